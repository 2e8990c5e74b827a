-- Ends an admission with what was delivered: moves it from reserved to used, refunds the rest, writes the ledger.
--
-- KEYS: open, the reservation. ARGV: owner, charge (requests, input, cached, output, cost, energy) as text, and in
-- doubles the same and kept (milliseconds that this end is remembered). Answers settled, already, superseded, or
-- missing: there is neither reservation nor memory of one, so what was delivered is still to be charged; nothing was
-- where no request is. What another owner had told before this one took over is charged in any case, and what one that
-- is superseded delivered is charged with its successor's. After a release the client may go on once more, and what was
-- charged before is remembered.

local owner, text = ARGV[1], redis.call('GET', KEYS[2])
if text == string.char(DONE) .. owner then
  return 'already'
end
local member, numbers = string.sub(KEYS[2], #prefix + 3), doubles(ARGV[3])
local r = text and parsed(text)
if not r or r.owner ~= owner then
  local key = prefix .. 'd:' .. member .. '\n' .. owner
  local ended = redis.call('GET', key)
  if ended == 'already' then
    return ended
  elseif ended then
    late().note_superseded(member, ended,
      string.format('%.0f %.0f %.0f %.0f', numbers[2], numbers[3], numbers[4], numbers[6]))
    return 'superseded'
  elseif r then
    redis.call('SET', key, 'superseded', 'PX', numbers[CHARGE + 1])
    return 'superseded'
  elseif numbers[1] == 0 then
    lapsing().remember(text, member, owner, numbers[CHARGE + 1])
  end
  return 'missing'
end
local told, is_release, reason = r.numbers, numbers[1] == 0, r.state == OPEN and 'settled' or 'late'
if numbers[2] < told[PROGRESS] or numbers[4] < told[PROGRESS + 2] or is_release and told[CHARGED] > 0 then
  lapsing().lapse(KEYS[2], member, r, reason, 'PX', EXPIRED_KEPT)
  if is_release then
    return 'settled'
  end
end
if is_release and r.first then -- what its former owners tell late is part of what the client goes on with
  lapsing().close_to(KEYS[2], member, r, numbers, ARGV[2], reason, 'PX', EXPIRED_KEPT)
  return 'settled'
elseif r.first then
  lapsing().close_to(prefix .. 'a:' .. member .. '\n' .. r.first, member, r, numbers, ARGV[2], reason,
    'PX', numbers[CHARGE + 1])
else
  ending().close(member, r, numbers, ARGV[2], reason)
end
redis.call('SET', KEYS[2], string.char(DONE) .. owner, 'PX', numbers[CHARGE + 1])
return 'settled'
