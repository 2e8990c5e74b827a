-- What a script that debits is told: a plan in doubles, as the script itself explains its beginning. From FIRST on, for
-- each scope in the order of its keys: how many windows it counts in, 1 if it counts requests in progress, its limit of
-- these, the burst times its interval, that interval (microseconds; 0: no burst), until when at least the counters live
-- if they are written while the plan holds (milliseconds; 0: a day from now), and the minute's limits of requests, input
-- and output. Then for each window its id, the limit of tokens, and the one to warn of (0: none). The minute is the
-- first one, if it is among them. No limit is one that no total reaches.

local SCOPE, LIMITS = 9, 3 -- how many numbers a scope has, and each of its windows
local FLOW_KEPT = 86400000 -- milliseconds after a claim: what it counts must outlive it

local now, second = time()

-- The planned windows' counters of all scopes, one after the other, whatever order the values have them in: for a new
-- scope, and once a minute. Then for each scope the text of its other windows, if they are not long over, until when it
-- lives for their sake, and which of the planned windows are new.
local function rearranged(values, plan)
  local KEPT = { [MINUTE] = 120, [DAY] = 108000, [MONTH] = 2851200 } -- seconds after its start
  local counters, others, lives, fresh, size, at = {}, {}, {}, {}, 0, FIRST

  -- Adds a scope that has no counters.
  local function begin(count)
    counters[size + 1], counters[size + 2] = 0, 0
    size = size + FLOW
    for limits = at + SCOPE, at + SCOPE + (count - 1) * LIMITS, LIMITS do
      counters[size + 1], counters[size + 2], counters[size + 3] = plan[limits], 0, 0
      counters[size + 4], counters[size + 5], counters[size + 6] = 0, 0, 0
      counters[size + 7], counters[size + 8], counters[size + 9] = 0, 0, 0
      size = size + WINDOW
    end
  end

  -- Adds a scope that has some. What is left of them, and until when that is of use.
  local function arrange(before, count, is_fresh)
    local taken, rest, last = {}, {}, 0
    counters[size + 1], counters[size + 2] = before[1], before[2]
    size = size + FLOW
    for window = 1, count do
      local id = plan[at + SCOPE + (window - 1) * LIMITS]
      local place = place_of(id, before, FLOW + 1, #before)
      counters[size + 1] = id
      for part = 1, WINDOW - 1 do
        counters[size + 1 + part] = place and before[place + part] or 0
      end
      size = size + WINDOW
      if place then
        taken[place] = true
      else
        is_fresh[window] = true
      end
    end
    for place = FLOW + 1, #before, WINDOW do
      local kind = before[place] % 4
      local kept = (before[place] - kind) / 4 + KEPT[kind]
      if not taken[place] and kept > second then
        last = math.max(last, kept * 1000)
        for part = 0, WINDOW - 1 do
          rest[#rest + 1] = before[place + part]
        end
      end
    end
    return packed(rest), last
  end

  for position = 3, #KEYS do
    local value, count = values[position - 1], plan[at]
    if value then
      local is_fresh = {}
      others[position], lives[position] = arrange(doubles(value), count, is_fresh)
      fresh[position] = is_fresh
    else
      others[position], lives[position] = '', 0
      begin(count)
    end
    at = at + SCOPE + count * LIMITS
  end
  return counters, others, lives, fresh
end

-- Writes the counters of all scopes, each of which lives until its last window has ended, and longer than any request
-- in progress. Where all of them were in the plan's order (no `others`), only their beginning changes, and most live
-- long enough since they were rearranged for the last window, or this minute. Gives their text.
local function keep(counters, plan, others, lives)
  local text, from, at = packed(counters), 1, FIRST
  local least = second * 1000 + FLOW_KEPT
  for position = 3, #KEYS do
    local key, till, planned = KEYS[position], from + (FLOW + plan[at] * WINDOW) * DOUBLE, plan[at + 5]
    local part = string.sub(text, from, till - 1)
    if others then
      redis.call('SET', key, part .. others[position], 'PXAT', math.max(planned, lives[position], least))
    else
      redis.call('SETRANGE', key, '0', part)
      if planned < least and now / 1000 + redis.call('PTTL', key) < least then -- else for windows of other limits
        redis.call('PEXPIREAT', key, least)
      end
    end
    from, at = till, at + SCOPE + plan[at] * LIMITS
  end
  return text
end
