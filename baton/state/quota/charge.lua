-- Charges an admission that has no reservation: it was served while the shared counters were away or lost it.
--
-- KEYS: open, the reservation, the scopes. ARGV: owner, prices and tenant and key and model (lines), the plan, in doubles
-- the windows that it draws on, as a reservation keeps them, and the charge as text. The plan begins with the charge,
-- kept (milliseconds), and from when until when (seconds) it holds the server's time. Answers doubles: status and now.
-- Status: settled, already, superseded (the request is reserved again), elsewhen (the windows do not hold the server's
-- time).

local SETTLED, ALREADY, SUPERSEDED, ELSEWHEN = 0, 1, 2, 4
local FIRST = 10 -- where the plan's scopes begin

local owner, plan = ARGV[1], doubles(ARGV[3])
if second < plan[8] or second >= plan[9] then
  return struct.pack('dd', ELSEWHEN, now)
end
local member, values = string.sub(KEYS[2], #prefix + 3), redis.call('MGET', unpack(KEYS, 2))
local ended, text = redis.call('GET', prefix .. 'd:' .. member .. '\n' .. owner), values[1]
if ended then
  return struct.pack('dd', ended == 'already' and ALREADY or SUPERSEDED, now)
elseif text == string.char(DONE) .. owner then
  return struct.pack('dd', ALREADY, now)
elseif text and parsed(text) then
  return struct.pack('dd', SUPERSEDED, now)
end

local counters, others, lives = rearranged(values, plan)
local place, at = 1, FIRST
for _ = 3, #KEYS do
  local count = plan[at]
  place, at = place + FLOW, at + SCOPE
  for _ = 1, count do
    counters[place + 7] = plan[at + 2]
    place, at = place + WINDOW, at + LIMITS
  end
end
keep(counters, plan, others, lives)
local ends = ending()
ends.move({ unpack(KEYS, 3) }, doubles(ARGV[4]), 1, { 0, 0, 0 }, { plan[1], plan[2], plan[4] }, false)
local tenant, key, model = string.match(ARGV[2], '^[^\n]*\n([^\n]*)\n([^\n]*)\n([^\n]*)$')
ends.book('unreserved', member, tenant, key, model, now, ARGV[5])
lapsing().remember(text, member, owner, plan[CHARGE + 1])
return struct.pack('dd', SETTLED, now)
