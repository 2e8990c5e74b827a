"""Wire messages to the nouns of ``baton.core.types`` and back, one module per file of protos/baton/v1.

Every pair is an exact round trip. ``X_to_wire`` of a request raises InvalidRequest for a value that its field cannot
carry, ``X_from_wire`` for a message that lacks a part without which it means nothing. Limits (token ids, temperatures
...) are not checked here.
"""
