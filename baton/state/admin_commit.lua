-- Changes records, their indexes and the audit log in one step, or nothing at all. KEYS: the audit log. ARGV: one JSON
-- object. All keys have the same hash tag. Answers {'done'}, or why nothing was done.

local order = cjson.decode(ARGV[1])

if order.request ~= '' then
  local answer = redis.call('GET', order.request)
  if answer then
    return { 'repeated', answer }
  end
end
for place, parent in ipairs(order.parents) do
  if redis.call('EXISTS', parent) == 0 then
    return { 'missing', tostring(place) }
  end
end
for place, change in ipairs(order.changes) do
  local found = redis.call('HGET', change.record, 'etag') or ''
  if found ~= change.expected then
    return { 'conflict', tostring(place), found }
  end
end
for place, emptied in ipairs(order.emptied) do
  if redis.call('ZCARD', emptied.index) ~= emptied.leaving then
    return { 'occupied', tostring(place) }
  end
end

for _, change in ipairs(order.changes) do
  if change.data == '' then
    redis.call('DEL', change.record)
    redis.call('ZREM', change.index, change.id)
  else
    redis.call('HSET', change.record, 'etag', change.etag, 'data', change.data)
    redis.call('ZADD', change.index, 0, change.id)
  end
  redis.call('XADD', KEYS[1], '*', 'actor', order.actor, 'action', order.action, 'resource', change.resource,
    'before', change.before, 'after', change.after, 'request', order.request_id)
end
if order.request ~= '' then
  redis.call('SET', order.request, order.answer, 'EX', order.remember)
end
return { 'done' }
