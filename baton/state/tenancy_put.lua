-- Writes one record if it is still the one that the writer saw. KEYS: the record. ARGV: the etag expected ("": there is
-- none yet, "*": whichever), the new etag, the data. Answers 1, or the etag found ("" for none).

local found = redis.call('HGET', KEYS[1], 'etag') or ''
if ARGV[1] ~= '*' and ARGV[1] ~= found then
  return found
end
redis.call('HSET', KEYS[1], 'etag', ARGV[2], 'data', ARGV[3])
return 1
