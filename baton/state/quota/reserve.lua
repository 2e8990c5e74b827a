-- Reserves what a claim needs in all its buckets, or nothing in any.
--
-- KEYS: open, the reservation, the scopes. ARGV: owner, prices and tenant and key and model (lines), the plan, and in
-- doubles the windows that the reservation draws on, as it keeps them. The plan begins with what is claimed (input,
-- output, lease in microseconds, kept in milliseconds), and from when until when (seconds) it holds the server's time.
--
-- Answers doubles: status, now, and where it has counters to tell the cost (requests, input, output), and the counters
-- of each scope's planned windows. Status: granted, with what was debited and the counters after it; refused, with what
-- would have been debited, or taken (an open reservation of the same request and size), with the counters as they are;
-- in use (of another size); elsewhen (the windows do not hold the server's time); ended (this very admission has, or
-- another one has taken its place).

local GRANTED, REFUSED, TAKEN, IN_USE, ELSEWHEN, ENDED = 0, 1, 2, 3, 4, 5
local FIRST = 7 -- where the plan's scopes begin

local owner, plan = ARGV[1], doubles(ARGV[3])
local asked_input, asked_output, lease, kept = plan[1], plan[2], plan[3], plan[4]
if second < plan[5] or second >= plan[6] then
  return struct.pack('dd', ELSEWHEN, now)
end
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', '0', '16')
if due[1] then
  lapsing().expire_all(due)
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
    if known.owner ~= owner then
      known.first = known.first or known.owner
      redis.call('SET', prefix .. 'd:' .. member .. '\n' .. known.owner, 'superseded' .. known.first, 'PX', kept)
      known.owner = owner
    end
    write(KEYS[2], known)
    redis.call('ZADD', KEYS[1], now + lease, member)
    return struct.pack('ddddd', TAKEN, now, 0, 0, 0) .. packed((rearranged(values, plan)))
  elseif is_same then
    charged = { unpack(numbers, CHARGED, CHARGED + CHARGE - 1) }
    requests, input, output = above(1, charged[1]), above(input, charged[2]), above(output, charged[4])
  end
end

-- Adds the claim to the counters. Whether it breaks no limit, or nil if they are others than the planned ones.
local function debit(counters, plan, requests, input, output)
  local fits, base, at, tokens = true, 0, FIRST, input + output
  for _ = 3, #KEYS do
    local count, interval = plan[at], plan[at + 4]
    if counters[base + 1] + 1 > plan[at + 2] then
      fits = false
    end
    counters[base + 1] = counters[base + 1] + plan[at + 1]
    if interval > 0 then
      local late = above(counters[base + 2], now) + requests * interval
      if requests > 0 and late > plan[at + 3] then
        fits = false
      end
      counters[base + 2] = now + late
    end
    local place, limits = base + FLOW + 1, at + SCOPE
    if count > 0 and (requests > 0 and counters[place + 1] + requests > plan[at + 6]
      or input > 0 and counters[place + 2] + input > plan[at + 7]
      or output > 0 and counters[place + 3] + output > plan[at + 8]) then
      fits = false
    end
    for _ = 1, count do
      local total_input, total_output = counters[place + 2] + input, counters[place + 3] + output
      if counters[place] ~= plan[limits] then
        return nil
      elseif tokens > 0 and total_input + total_output > plan[limits + 1] then
        fits = false
      end
      counters[place + 1], counters[place + 2] = counters[place + 1] + requests, total_input
      counters[place + 3], counters[place + 7] = total_output, plan[limits + 2]
      place, limits = place + WINDOW, limits + LIMITS
    end
    base, at = place - 1, limits
  end
  return fits
end

-- Most values begin with the planned windows, and most of these are in the plan's order.
local texts, at = {}, FIRST
for position = 2, #values do
  local value, size = values[position], (FLOW + plan[at] * WINDOW) * DOUBLE
  if not value or #value < size then
    break
  end
  texts[position - 1] = #value == size and value or string.sub(value, 1, size)
  at = at + SCOPE + plan[at] * LIMITS
end
local counters, fits, others, lives
if texts[#KEYS - 2] then
  counters = doubles(table.concat(texts))
  fits = debit(counters, plan, requests, input, output)
end
if fits == nil then
  counters, others, lives = rearranged(values, plan)
  fits = debit(counters, plan, requests, input, output)
end

-- With the counters as they are. Windows that warn, and whose tokens are used up, tell so.
if not fits then
  local fresh
  counters, others, lives, fresh = rearranged(values, plan)
  local answer = struct.pack('ddddd', REFUSED, now, requests, input, output) .. packed(counters)
  local is_told, place, limits = false, 1, FIRST
  for position = 3, #KEYS do
    local count, new = plan[limits], fresh[position]
    place, limits = place + FLOW, limits + SCOPE
    for window = 1, count do
      local total, limit = counters[place + 2] + input + counters[place + 3] + output, plan[limits + 2]
      if input + output > 0 and total > plan[limits + 1] and limit > 0 and counters[place + 8] < 100
        and new and not new[window] then
        is_told, counters[place + 7] = true, limit
        ending().warn(KEYS[position], counters, place, 100)
      end
      place, limits = place + WINDOW, limits + LIMITS
    end
  end
  if is_told then
    keep(counters, plan, others, lives)
  end
  return answer
end

local text = keep(counters, plan, others, lives)
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
-- As `write` would, of which most is known already: numbers without progress, and the windows.
local size = OWNER + #ARGV[4] / DOUBLE
redis.call('SET', KEYS[2], string.char(first and OPEN - CAPITAL or OPEN, size)
  .. struct.pack('dddddd', now, asked_input, asked_output, requests, input, output)
  .. (charged and packed(charged) or string.rep('\0', CHARGE * DOUBLE))
  .. struct.pack('ddddd', 0, 0, 0, 0, #owner) .. ARGV[4] .. owner .. (first and first .. '\n' or '')
  .. ARGV[2] .. '\n' .. table.concat(KEYS, '\n', 3))
redis.call('ZADD', KEYS[1], now + lease, member)
return struct.pack('ddddd', GRANTED, now, requests, input, output) .. text
