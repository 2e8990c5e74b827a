-- Removes the record KEYS[1] if it still belongs to epoch ARGV[1]; a successor's record stays.
-- The epoch is compared as text: a 64-bit number does not survive Lua's doubles.
local record = redis.call('GET', KEYS[1])
if record and string.find(record, '"epoch":' .. ARGV[1] .. '[,}]') then
  return redis.call('DEL', KEYS[1])
end
return 0
