-- Charges an admission that has no reservation: it was served while the shared counters were away or lost it.
--
-- ARGV: prefix, member, owner, who, requests, input, cached, output, cost, energy, kept, windows, then for each window
-- name start end and the limit to warn of. Answers {status, now}: settled, already, superseded (the request is reserved
-- again), elsewhen (the windows do not hold the server's time).

local member, owner, who, windows = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[12])
local FIRST, WINDOW = 13, 4
local last = FIRST + (windows - 1) * WINDOW
for row = FIRST, last, WINDOW do
  if now < tonumber(ARGV[row + 1]) or now >= tonumber(ARGV[row + 2]) then
    return { 'elsewhen', now }
  end
end
local done = prefix .. 'd:' .. member .. '\n' .. owner
local ended = redis.call('GET', done)
if ended then
  return { ended, now }
end
if redis.call('EXISTS', prefix .. 'r:' .. member) == 1 then
  return { 'superseded', now }
end
local used = {}
for position = 1, 6 do
  used[position] = tonumber(ARGV[4 + position])
end
for row = FIRST, last, WINDOW do
  local key = prefix .. ARGV[row]
  if redis.call('EXISTS', key) == 0 then
    open_window(ARGV[row], ARGV[row + 2])
  end
  redis.call('HSET', key, 'lt', ARGV[row + 3])
  move(ARGV[row], { 0, 0, 0 }, { used[1], used[2], used[4] })
end
book('unreserved', request_of(member), who, int(now), used)
redis.call('SET', done, 'already', 'PX', ARGV[11])
return { 'settled', now }
