"""The ``baton`` command and the local launcher."""
