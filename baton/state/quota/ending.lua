-- How a reservation ends: moved from reserved to used, charged, booked. Most calls need none of it, so these functions
-- are made when they are needed.

local function ending()
  local KIND_NAMES = { [DAY] = 'day', [MONTH] = 'month' }

  -- Tells of a window, whose numbers begin at `at`, when it is used to a higher percentage than was told before.
  local function warn(key, counters, at, percent)
    local kind, limit, used = counters[at] % 4, counters[at + 7], counters[at + 5] + counters[at + 6]
    counters[at + 8] = percent
    redis.call('XADD', prefix .. 'alerts', 'MAXLEN', '~', ALERTS_KEPT, '*',
      'bucket', KIND_NAMES[kind] .. ':' .. (counters[at] - kind) / 4 .. ':' .. string.sub(key, #prefix + 1),
      'percent', percent, 'limit', string.format('%.0f', limit), 'used', string.format('%.0f', used))
  end

  -- Moves what was held to what was used in one window. Counters that were evicted and begun anew do not know what is
  -- given back to them; their reserved part stops at 0.
  local function move_window(key, counters, at, held, used)
    local requests, input, output = counters[at + 4], counters[at + 5], counters[at + 6]
    local requests_after, input_after, output_after = requests + used[1], input + used[2], output + used[3]
    counters[at + 1] = requests_after + above(counters[at + 1] - requests, held[1])
    counters[at + 2] = input_after + above(counters[at + 2] - input, held[2])
    counters[at + 3] = output_after + above(counters[at + 3] - output, held[3])
    counters[at + 4], counters[at + 5], counters[at + 6] = requests_after, input_after, output_after
    local limit, tokens = counters[at + 7], input_after + output_after
    if limit > 0 and tokens * 2 >= limit then
      local percent = tokens >= limit and 100 or tokens * 100 >= limit * 80 and 80 or 50
      if percent > counters[at + 8] then
        warn(key, counters, at, percent)
      end
    end
  end

  -- Moves what was held, {requests, input, output}, to what was used, in every window that is still there, and a
  -- request in progress less if it `leaves`. `drawn`, from `at` on, tells the windows of each of the keys.
  local function move(keys, drawn, at, held, used, leaves)
    local there, values = {}, {}
    for position, value in ipairs(redis.call('MGET', unpack(keys))) do
      if value then
        there[#there + 1], values[#values + 1] = keys[position], value
      else
        there[#there + 1], values[#values + 1] = false, ''
      end
    end
    local counters, base = doubles(table.concat(values)), 1
    for position, key in ipairs(there) do
      local runs, count, next_base = drawn[at], drawn[at + 1], base + #values[position] / DOUBLE
      if key then
        if leaves then
          counters[base] = above(counters[base], runs)
        end
        for window = at + 2, at + 1 + count do
          local place = place_of(drawn[window], counters, base + FLOW, next_base - 1)
          if place then
            move_window(key, counters, place, held, used)
          end
        end
      end
      at, base = at + 2 + count, next_base
    end
    local text, from = packed(counters), 1
    for position, key in ipairs(there) do
      local size = #values[position]
      if key then
        redis.call('SET', key, string.sub(text, from, from + size - 1), 'KEEPTTL')
      end
      from = from + size
    end
  end

  -- One line of the ledger: `used` is a text of what a charge counts.
  local function book(reason, member, tenant, key, model, at, used)
    redis.call('XADD', prefix .. 'ledger', '*', 'at', at, 'reason', reason,
      'request', string.match(member, '^[^/]*/(.*)$'), 'tenant', tenant, 'key', key, 'model', model, 'used', used)
  end

  -- What tokens and energy cost: prices {input, cached, output, joule}. Energy may be more millijoules times units than
  -- a double holds, so whole joules are counted first.
  local function cost_of(input, cached, output, energy, prices)
    local price, cached_price, output_price, joule = string.match(prices, '^(%d+) (%d+) (%d+) (%d+)$')
    local whole = math.floor(energy / 1000)
    return (input - cached) * price + cached * cached_price + output * output_price
      + whole * joule + math.floor((energy - whole * 1000) * joule / 1000)
  end

  local function text_of(numbers)
    local words = {}
    for position, number in ipairs(numbers) do
      words[position] = string.format('%.0f', number)
    end
    return table.concat(words, ' ')
  end

  -- Ends a reservation: refunds what it held, charges what `total` has more than was charged before. `text`, where the
  -- caller has it, is that of `total`.
  local function close(member, r, total, text, reason)
    local numbers, used, is_charged, is_less = r.numbers, {}, false, false
    for position = 1, CHARGE do
      local before = numbers[CHARGED + position - 1]
      used[position] = above(total[position], before)
      is_charged = is_charged or used[position] > 0
      is_less = is_less or before > 0
    end
    local is_open = r.state == OPEN
    local tenant, key, model, scopes = string.match(r.rest, '^[^\n]*\n([^\n]*)\n([^\n]*)\n([^\n]*)\n(.*)$')
    local keys = {}
    for scope in string.gmatch(scopes, '[^\n]+') do
      keys[#keys + 1] = scope
    end
    local held = { numbers[HELD], numbers[HELD + 1], numbers[HELD + 2] }
    move(keys, numbers, DRAWN, held, { used[1], used[2], used[4] }, is_open)
    if is_open then
      redis.call('ZREM', KEYS[1], member)
    end
    if is_charged then
      book(reason, member, tenant, key, model, numbers[MOMENT], not is_less and text or text_of(used))
    end
  end

  -- The same, and leaves it at the key, as one that expired. Further arguments are those of SET.
  local function close_to(key, member, r, total, text, reason, ...)
    close(member, r, total, text, reason)
    local numbers = r.numbers
    for position = 1, CHARGE do
      local at = CHARGED + position - 1
      numbers[at] = math.max(total[position], numbers[at])
    end
    r.state, numbers[HELD], numbers[HELD + 1], numbers[HELD + 2] = EXPIRED, 0, 0, 0
    write(key, r, ...)
  end

  -- Charges a reservation for what its gateway last told of it, and leaves it expired.
  local function lapse(key, member, r, reason, ...)
    local numbers = r.numbers
    local input, cached, output, energy = unpack(numbers, PROGRESS, PROGRESS + 3)
    local cost = cost_of(input, cached, output, energy, string.match(r.rest, '^[^\n]*'))
    close_to(key, member, r, { 1, input, cached, output, cost, energy }, nil, reason, ...)
  end

  -- Ends a reservation whose lease has ended.
  local function expire(member)
    local key = prefix .. 'r:' .. member
    local text = redis.call('GET', key)
    local r = text and parsed(text)
    if r and r.state == OPEN then
      lapse(key, member, r, 'expired', 'PX', EXPIRED_KEPT)
    else
      redis.call('ZREM', KEYS[1], member)
    end
  end

  -- Remembers that an admission without a reservation has ended, in the place of one: should its own reserve arrive
  -- only now (sent before the counters were away, read when they came back), it changes nothing. `text` is what is there.
  local function remember(text, member, owner, kept)
    if text then
      redis.call('SET', prefix .. 'd:' .. member .. '\n' .. string.sub(text, 2), 'already', 'PX', kept)
    end
    redis.call('SET', KEYS[2], string.char(DONE) .. owner, 'PX', kept)
  end

  local function expire_all(due)
    for _, member in ipairs(due) do
      expire(member)
    end
  end

  return {
    warn = warn, move_window = move_window, book = book, close = close, close_to = close_to, remember = remember,
    lapse = lapse, expire_all = expire_all,
  }
end
