"""The gateway's front doors: each translates one protocol to ``GatewayApi``."""
