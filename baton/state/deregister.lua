-- Removes the record KEYS[2], and the id ARGV[1] from the index KEYS[1], if it still belongs to epoch ARGV[2]; a
-- successor's record stays. The epoch is compared as text: a 64-bit number does not survive Lua's doubles.
local record = redis.call('GET', KEYS[2])
if record and string.find(record, '"epoch":' .. ARGV[2] .. '[,}]') then
  redis.call('ZREM', KEYS[1], ARGV[1])
  return redis.call('DEL', KEYS[2])
end
return 0
