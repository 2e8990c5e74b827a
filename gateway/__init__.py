"""The one door: authentication, text, placement, relay, resume. Never loads torch."""
