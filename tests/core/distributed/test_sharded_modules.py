"""Which modules ``fully_shard`` was called for, as layers ask when they load a state or begin a step."""

from __future__ import annotations

import forking

CODE = """
import torch
from ottava.distributed import fsdp2

def refuse():
    raise AssertionError("all objects of the process are looked through")

fsdp2.gc.get_objects = refuse
print(fsdp2.sharded_modules())
from torch.distributed.fsdp import FSDPModule
print(fsdp2.sharded_modules())
"""


def test_where_nothing_is_sharded_no_objects_are_looked_through() -> None:
    """That takes tens of milliseconds for each layer with a state; whether or not FSDP2 is imported."""
    done = forking.python(CODE)
    assert done.stdout.split() == ["[]", "[]"], done.stderr
