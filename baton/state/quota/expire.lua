-- Ends reservations whose lease has ended. KEYS: open. ARGV: how many at most. Answers how many it found.

local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', (time()), 'LIMIT', 0, ARGV[1])
lapsing().expire_all(due)
return #due
