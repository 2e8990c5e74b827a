-- Notes what gateways that died had delivered; no lease grows longer by it. KEYS: open. ARGV: for each reservation
-- member, owner and progress (input, cached, output, millijoules). What is told of one that has expired is charged at
-- once. Answers how many of them were still those gateways' own.

local found = 0
for row = 1, #ARGV, 3 do
  local key = prefix .. 'r:' .. ARGV[row]
  local text = redis.call('GET', key)
  local known = text and parsed(text)
  if known and known.owner == ARGV[row + 1] then
    found = found + 1
    if not tell(known, ARGV[row + 2]) then
      -- more is known
    elseif known.state == OPEN then
      write(key, known)
    else
      ending().lapse(ARGV[row], known, 'late')
    end
  end
end
return found
