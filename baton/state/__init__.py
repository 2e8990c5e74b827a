"""Everything that lives in Redis, with an in-memory twin that passes the same contract suite."""
