"""``fully_shard`` in processes that have imported ``ottava`` alone: its hooks are there without an
import."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

import forking

CODE = """
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

folder = Path(sys.argv[1])


def losses(kind, recipe, rank):
    "Of two ranks, or of one process where ``rank`` is None."
    import ottava

    torch.manual_seed(0)
    torch.set_num_threads(1)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    model = ottava.convert(plain, recipe, primary=kind == "primary")
    if rank is not None:
        store = dist.FileStore(str(folder / f"store-{kind}"), 2)
        dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
        fully_shard(model[0])
        fully_shard(model)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=1.0), []
    for step in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(7)) * (1 + step % 2)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    if rank is not None:
        dist.barrier()
    return seen


def fork(kind, recipe, rank):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        (folder / f"{kind}-{rank}").write_text(json.dumps(losses(kind, recipe, rank)))
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


assert not any(name.startswith("ottava") for name in sys.modules)
failed = False
for kind, recipe in (("primary", "current"), ("converted", "delayed")):
    children = [fork(kind, recipe, rank) for rank in (0, 1, None)]
    failed |= any([os.waitpid(child, 0)[1] for child in children])
sys.exit(failed)
"""


def test_ranks_that_import_ottava_alone_have_the_losses_of_one_process(tmp_path: Path) -> None:
    done = forking.python(CODE, tmp_path, GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stderr
    for kind in ("primary", "converted"):
        first, second, alone = (
            json.loads((tmp_path / f"{kind}-{rank}").read_text()) for rank in (0, 1, None)
        )
        assert alone[2] < alone[0]
        assert first == second == alone
