"""A server with `[events]`, engines that store and load through it, and readers of what it tells."""

from __future__ import annotations

import random
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from kvframework.api.content import ChunkContent
from kvframework.api.hasher import KeyHasher
from kvframework.api.requests import CacheKey
from kvframework.wire import messages as m
from tests.events.reader import Reader
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient
