-- Renews leases and notes progress. ARGV: prefix, lease (microseconds), then for each reservation
-- member owner progress. Answers a state for each: renewed, superseded, expired, missing.

local states = {}
for row = 3, #ARGV, 3 do
  local member, owner = ARGV[row], ARGV[row + 1]
  local key = prefix .. 'r:' .. member
  local known = redis.call('HMGET', key, 'state', 'owner')
  local state = 'renewed'
  if not known[1] then
    local ended = redis.call('GET', prefix .. 'd:' .. member .. '\n' .. owner)
    state = ended == 'superseded' and 'superseded' or 'missing'
  elseif known[2] ~= owner then
    state = 'superseded'
  elseif known[1] == 'expired' then
    state = 'expired'
  else
    redis.call('HSET', key, 'progress', ARGV[row + 2])
    redis.call('ZADD', prefix .. 'open', int(now + ARGV[2]), member)
  end
  states[#states + 1] = state
end
return states
