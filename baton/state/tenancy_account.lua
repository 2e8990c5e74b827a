-- A key with its tenant and organisation, as one moment has them. KEYS: the key's record. ARGV: the prefixes of tenants and
-- organisations, which have the same hash tag. Answers the three records, or fewer where one is missing.

local key = redis.call('HGET', KEYS[1], 'data')
if not key then
  return {}
end
local tenant = redis.call('HGET', ARGV[1] .. cjson.decode(key)['tenant'], 'data')
if not tenant then
  return { key }
end
local organisation = redis.call('HGET', ARGV[2] .. cjson.decode(tenant)['organisation'], 'data')
if not organisation then
  return { key, tenant }
end
return { key, tenant, organisation }
