-- Keeps the record ARGV[2] of the process ARGV[1] at KEYS[2] for a lease of ARGV[3] milliseconds, and its id in the index
-- KEYS[1], scored by when the lease ends. Those whose lease has ended leave the index.
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('EXPIRE', KEYS[1], 86400)
return 1
