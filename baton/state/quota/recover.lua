-- Notes what gateways that died had delivered; no lease grows longer by it. KEYS: open. ARGV: for each reservation
-- member, owner and progress (input, cached, output, millijoules). What is told of one that has ended is charged at
-- once. Answers how many of them were still those gateways' own.

local found, noting = 0, late()
for row = 1, #ARGV, 3 do
  local member, owner, told = ARGV[row], ARGV[row + 1], ARGV[row + 2]
  local key = prefix .. 'r:' .. member
  local text = redis.call('GET', key)
  local known = text and parsed(text)
  if known and known.owner == owner then
    found = found + 1
    noting.note(key, member, known, told)
  else
    local ended = redis.call('GET', prefix .. 'd:' .. member .. '\n' .. owner)
    if ended and ended ~= 'already' then
      noting.note_superseded(member, ended, told)
    end
  end
end
return found
