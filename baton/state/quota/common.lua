-- The beginning of every quota script. All keys of an organisation have its hash tag and so one slot; KEYS[1] routes
-- the call there. The caller names the keys that it knows; those of leases that ended are made from the prefix.
--
-- <prefix>open      sorted set: open reservations by the end of their lease (microseconds)
-- <prefix>r:<member>            one reservation; member is tenant/request id
-- <prefix>d:<member>\n<owner>   'already': this admission is settled; or 'superseded' and the first owner of the one that
--                   it was taken over with, if it ever had the reservation: what it tells late is charged there
-- <prefix>a:<member>\n<first owner>   a reservation that had other owners before and has ended, as one that expired
-- <prefix><scope>   one level's counters, for one model or all
-- <prefix>ledger, <prefix>alerts   streams
--
-- A script holds up the server. Each call from here costs about a microsecond, and so do three numbers read from or
-- written to text; as doubles in binary, a dozen. Numbers are whole and below 2^53, so doubles hold them.
--
-- Counters are doubles: requests in progress, when the burst will be whole again (microseconds), and for each window
-- WINDOW numbers: its id, totals (used and reserved) of requests, input and output, what of them was used, the limit to
-- warn of (0: none) and the highest percentage warned of. An id is the start (seconds) times 4, and the kind.
--
-- A reservation is a letter of its state, how many numbers follow, these as doubles, its owner (no line breaks in it),
-- and lines: prices, tenant, key, model, and the keys of the scopes it draws on. One that was taken over has a capital
-- letter, and before these lines one with its first owner. One that is settled is a letter and the owner.

local prefix = string.sub(KEYS[1], 1, -5)

-- Constants are written in the place of their names before the script is sent (scripts.py): what functions use of the
-- script's own is paid for at each call.
local FLOW, WINDOW, DOUBLE = 2, 9, 8
local MINUTE, DAY, MONTH = 0, 1, 2 -- kinds of windows
local OPEN, EXPIRED, DONE = 111, 120, 100 -- o, x, d
local CAPITAL, SUPERSEDED_SIZE = 32, 10 -- what is less in a capital letter; the length of 'superseded'
local MOMENT, SIZE, HELD, CHARGED, PROGRESS, OWNER, DRAWN = 1, 2, 4, 7, 13, 17, 18 -- of a reservation's numbers
local EXPIRED_KEPT = 86400000 -- milliseconds: a settlement that comes after the lease charges only the rest
local ALERTS_KEPT = 10000
local CHARGE = 6 -- requests, input, cached, output, cost, energy: what a charge counts, in this order

local function doubles(text)
  local numbers = { struct.unpack(string.rep('d', #text / DOUBLE), text) }
  numbers[#numbers] = nil -- where the next would begin
  return numbers
end

local function packed(numbers)
  return struct.pack(string.rep('d', #numbers), unpack(numbers))
end

-- The server's time: microseconds, and whole seconds.
local function time()
  local clock = redis.call('TIME')
  local second = tonumber(clock[1])
  return second * 1000000 + clock[2], second
end

local function above(more, less)
  if more > less then
    return more - less
  end
  return 0
end

-- A reservation from its text, or nil, which one that is settled is, too. `first` is its first owner, if it was taken
-- over. Its numbers: when it was debited, its size (input, output), what it holds (requests, input, output), what was
-- charged before, its progress (input, cached, output, millijoules), the length of its owner, and for each scope 1 if it
-- counts as running there, how many windows, their ids.
local function parsed(text)
  local state, count = string.byte(text, 1, 2)
  if state == DONE then
    return nil
  end
  local numbers = { struct.unpack(string.rep('d', count), text, 3) }
  local owner = table.remove(numbers) -- unpack tells where it begins
  local rest = owner + numbers[OWNER]
  local r = { state = state, numbers = numbers, owner = string.sub(text, owner, rest - 1), rest = string.sub(text, rest) }
  if state ~= OPEN and state ~= EXPIRED then
    r.state, r.first, r.rest = state + CAPITAL, string.match(r.rest, '^([^\n]*)\n(.*)$')
  end
  return r
end

-- Writes a reservation to the key; further arguments are those of SET.
local function write(key, r, ...)
  local state, rest = r.state, r.rest
  if r.first then
    state, rest = state - CAPITAL, r.first .. '\n' .. rest
  end
  r.numbers[OWNER] = #r.owner
  redis.call('SET', key, string.char(state, #r.numbers) .. packed(r.numbers) .. r.owner .. rest, ...)
end

-- Where the numbers of the window with this id begin, among those from `first` to `last`, or nil.
local function place_of(id, counters, first, last)
  for at = first, last - WINDOW + 1, WINDOW do
    if counters[at] == id then
      return at
    end
  end
  return nil
end
