-- Renews leases and notes progress. KEYS: open. ARGV: lease (microseconds), then for each reservation member, owner and
-- progress (input, cached, output, millijoules). Answers a state for each: renewed, superseded, expired, missing.

local states, ends = {}, time() + ARGV[1]
for row = 2, #ARGV, 3 do
  local member, owner = ARGV[row], ARGV[row + 1]
  local key = prefix .. 'r:' .. member
  local text = redis.call('GET', key)
  local known = text and parsed(text)
  local state = 'renewed'
  if not known or known.owner ~= owner then
    local ended = redis.call('GET', prefix .. 'd:' .. member .. '\n' .. owner)
    local is_superseded = ended and ended ~= 'already'
    if is_superseded then
      late().note_superseded(member, ended, ARGV[row + 2])
    end
    state = (known or is_superseded) and 'superseded' or 'missing'
  elseif known.state == EXPIRED then
    state = 'expired'
  else
    if tell(known, ARGV[row + 2]) then
      write(key, known)
    end
    redis.call('ZADD', KEYS[1], ends, member)
  end
  states[#states + 1] = state
end
return states
