-- Renews leases and notes progress. ARGV: prefix, lease (microseconds), then for each reservation
-- member owner progress. Answers a state for each: renewed, superseded, expired, missing.

local states = {}
for row = 3, #ARGV, 3 do
  local member, owner = ARGV[row], ARGV[row + 1]
  local known = read(member)
  local state = 'renewed'
  if not known then
    local ended = redis.call('GET', prefix .. 'd:' .. member .. '\n' .. owner)
    state = ended == 'superseded' and 'superseded' or 'missing'
  elseif known.owner ~= owner then
    state = 'superseded'
  elseif known.state == 'expired' then
    state = 'expired'
  else
    known.progress = ARGV[row + 2]
    write(member, known)
    redis.call('ZADD', prefix .. 'open', int(now + ARGV[2]), member)
  end
  states[#states + 1] = state
end
return states
