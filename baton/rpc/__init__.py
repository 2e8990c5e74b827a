"""Everything gRPC: how the Api protocols of ``baton.core.api`` travel between processes.

``serving`` runs a server for ``Service`` objects, ``channels`` opens connections. ``planner``, ``prefill``,
``kvreceiver``, ``directory`` and ``gateway`` hold an Api's service and client; DecodeApi has ``decode_link`` and
``decode_service``, the two ends of one multiplexed stream. ``wire`` converts messages, ``errors`` is the error table.
"""
