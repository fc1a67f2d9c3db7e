"""Public name of what actors of one's own need in their environment: Ray must not hide devices from them."""

from __future__ import annotations

from slime.ray.cluster import NOSET_VISIBLE_DEVICES

__all__ = ["NOSET_VISIBLE_DEVICES_ENV_VARS_LIST"]

NOSET_VISIBLE_DEVICES_ENV_VARS_LIST = list(NOSET_VISIBLE_DEVICES)
