-- Reserves what a claim needs in all its buckets, or nothing in any.
--
-- KEYS: open, the reservation, the scopes. ARGV: owner, prices and tenant and key and model (lines), then in doubles
-- what is claimed (input, output, lease in microseconds, kept in milliseconds), and the plan.
--
-- Answers doubles: status, now, and where it has counters to tell the cost (requests, input, output), and the counters
-- of each scope's planned windows. Status: granted, with what was debited and the counters after it; refused, with what
-- would have been debited, or taken (an open reservation of the same request and size), with the counters as they are;
-- in use (of another size); elsewhen (the windows do not hold the server's time); ended (this very admission has, or
-- another one has taken its place).

local GRANTED, REFUSED, TAKEN, IN_USE, ELSEWHEN, ENDED = 0, 1, 2, 3, 4, 5
local DUE = 16

local owner, plan = ARGV[1], doubles(ARGV[4])
local asked_input, asked_output, lease, kept = struct.unpack('dddd', ARGV[3])
if second < plan[1] or second >= plan[2] then
  return struct.pack('dd', ELSEWHEN, now)
end
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, DUE)
if due[1] then
  ending().expire_all(due)
end

local values = redis.call('MGET', unpack(KEYS, 2))
local member = string.sub(KEYS[2], #prefix + 3)
if values[1] and (values[1] == string.char(DONE) .. owner
  or redis.call('EXISTS', prefix .. 'd:' .. member .. '\n' .. owner) == 1) then
  return struct.pack('dd', ENDED, now)
end
local known = values[1] and parsed(values[1])
local requests, input, output = 1, asked_input, asked_output
local charged = nil
if known then
  local numbers = known.numbers
  local is_same = numbers[SIZE] == input and numbers[SIZE + 1] == output
  if known.state == OPEN then
    if not is_same then
      return struct.pack('dd', IN_USE, now)
    end
    requests, input, output = 0, 0, 0
  elseif is_same then
    charged = { unpack(numbers, CHARGED, CHARGED + CHARGE - 1) }
    requests, input, output = above(1, charged[1]), above(input, charged[2]), above(output, charged[4])
  end
end
local tokens = input + output

local keys, stored = { unpack(KEYS, 3) }, { unpack(values, 2, #KEYS - 1) }
local counters, others, fresh = gathered(stored, plan)

-- Whether the claim breaks a limit. Windows whose tokens are used up are remembered.
local is_refused, exhausted, base, at = false, nil, 0, FIRST
for position = 1, #keys do
  if counters[base + 1] + 1 > plan[at + 2]
    or requests > 0 and above(counters[base + 2], now) + requests * plan[at + 4] > plan[at + 3] then
    is_refused = true
  end
  local place, limits = base + FLOW + 1, at + SCOPE
  for window = 1, plan[at] do
    local total_input, total_output = counters[place + 2] + input, counters[place + 3] + output
    if tokens > 0 and total_input + total_output > plan[limits + 1] then
      is_refused = true
      if plan[limits + 5] > 0 and counters[place + 8] < 100 and not (fresh and fresh[position][window]) then
        exhausted = exhausted or {}
        exhausted[#exhausted + 1] = { key = keys[position], place = place, limit = plan[limits + 5] }
      end
    elseif requests > 0 and counters[place + 1] + requests > plan[limits + 2]
      or input > 0 and total_input > plan[limits + 3]
      or output > 0 and total_output > plan[limits + 4] then
      is_refused = true
    end
    place, limits = place + WINDOW, limits + LIMITS
  end
  base, at = place - 1, limits
end

if known and known.state == OPEN then
  if known.owner ~= owner then
    known.first = known.first or known.owner
    redis.call('SET', prefix .. 'd:' .. member .. '\n' .. known.owner, 'superseded' .. known.first, 'PX', kept)
    known.owner = owner
  end
  write(KEYS[2], known)
  redis.call('ZADD', KEYS[1], now + lease, member)
  return struct.pack('ddddd', TAKEN, now, requests, input, output) .. packed(counters)
end
if is_refused then
  local answer = struct.pack('ddddd', REFUSED, now, requests, input, output) .. packed(counters)
  if exhausted then
    local warn = ending().warn
    for _, full in ipairs(exhausted) do
      counters[full.place + 7] = full.limit
      warn(full.key, counters, full.place, 100)
    end
    keep(keys, counters, others, plan)
  end
  return answer
end

local numbers = { now, asked_input, asked_output, requests, input, output, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
if charged then
  for position = 1, CHARGE do
    numbers[CHARGED + position - 1] = charged[position]
  end
end
local next_number = DRAWN
base, at = 0, FIRST
for _ = 1, #keys do
  local interval, count = plan[at + 4], plan[at]
  counters[base + 1] = counters[base + 1] + plan[at + 1]
  if interval > 0 then
    counters[base + 2] = now + above(counters[base + 2], now) + requests * interval
  end
  numbers[next_number], numbers[next_number + 1] = plan[at + 1], count
  next_number = next_number + 2
  local place, limits = base + FLOW + 1, at + SCOPE
  for _ = 1, count do
    counters[place + 1] = counters[place + 1] + requests
    counters[place + 2] = counters[place + 2] + input
    counters[place + 3] = counters[place + 3] + output
    counters[place + 7] = plan[limits + 5]
    numbers[next_number] = counters[place]
    place, limits, next_number = place + WINDOW, limits + LIMITS, next_number + 1
  end
  base, at = place - 1, limits
end
local text = keep(keys, counters, others, plan)
local first = charged and known.first
if known and known.owner ~= owner then
  first = known.first or known.owner
  redis.call('SET', prefix .. 'd:' .. member .. '\n' .. known.owner, 'superseded' .. first, 'PX', kept)
  if not charged then -- another request: what is told late of that one is not this one's
    write(prefix .. 'a:' .. member .. '\n' .. first, known, 'PX', kept)
    first = nil
  end
elseif not known and values[1] then
  redis.call('SET', prefix .. 'd:' .. member .. '\n' .. string.sub(values[1], 2), 'already', 'PX', kept)
end
local rest = ARGV[2] .. '\n' .. table.concat(keys, '\n')
write(KEYS[2], { state = OPEN, numbers = numbers, owner = owner, first = first, rest = rest })
redis.call('ZADD', KEYS[1], now + lease, member)
return struct.pack('ddddd', GRANTED, now, requests, input, output) .. text
