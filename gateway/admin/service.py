"""The admin API as a whole. Implements ``AdminApi``."""

from __future__ import annotations

from gateway.admin.changes import AdminChanges
from gateway.admin.reports import AdminReports


class Admin(AdminReports, AdminChanges):
    """Both halves over the same parts."""
