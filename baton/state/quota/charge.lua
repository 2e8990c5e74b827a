-- Charges an admission that has no reservation: it was served while the shared counters were away or lost it.
--
-- KEYS: open, the reservation, the scopes. ARGV: owner, prices and tenant and key and model (lines), charge as text, in
-- doubles the same and kept (milliseconds), and the plan. Answers doubles: status and now. Status: settled, already,
-- superseded (the request is reserved again), elsewhen (the windows do not hold the server's time).

local SETTLED, ALREADY, SUPERSEDED, ELSEWHEN = 0, 1, 2, 4

local owner, numbers, plan = ARGV[1], doubles(ARGV[4]), doubles(ARGV[5])
if second < plan[1] or second >= plan[2] then
  return struct.pack('dd', ELSEWHEN, now)
end
local member = string.sub(KEYS[2], #prefix + 3)
local ended, text = redis.call('GET', prefix .. 'd:' .. member .. '\n' .. owner), redis.call('GET', KEYS[2])
if ended then
  return struct.pack('dd', ended == 'already' and ALREADY or SUPERSEDED, now)
elseif text == string.char(DONE) .. owner then
  return struct.pack('dd', ALREADY, now)
elseif text and parsed(text) then
  return struct.pack('dd', SUPERSEDED, now)
end

local ends = ending()
local keys, used = { unpack(KEYS, 3) }, { numbers[1], numbers[2], numbers[4] }
local counters, others = gathered(redis.call('MGET', unpack(keys)), plan)
local place, at = 1, FIRST
for _, key in ipairs(keys) do
  place = place + FLOW
  for window = 1, plan[at] do
    counters[place + 7] = plan[at + SCOPE + (window - 1) * LIMITS + 5]
    ends.move_window(key, counters, place, { 0, 0, 0 }, used)
    place = place + WINDOW
  end
  at = at + SCOPE + plan[at] * LIMITS
end
keep(keys, counters, others, plan)
local tenant, key, model = string.match(ARGV[2], '^[^\n]*\n([^\n]*)\n([^\n]*)\n([^\n]*)$')
ends.book('unreserved', member, tenant, key, model, now, ARGV[3])
ends.remember(text, member, owner, numbers[CHARGE + 1])
return struct.pack('dd', SETTLED, now)
