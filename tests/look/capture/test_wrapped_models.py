"""Models in wrappers for training on several devices, quantised, or with adapters: names are those of the model."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_models import SelfAttention, run_watched
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from jumok.look.capture.watch import watch
from jumok.look.views.ablation import knock_out

pytestmark = pytest.mark.long
X = torch.randn(2, 5, 6)


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(SelfAttention(), nn.Sequential(SelfAttention())).eval()


def compute_weights() -> list[Tensor]:
    with watch(model := build_model()) as captures:
        model(X)
    return [layer.weights() for layer in captures]


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def check(model: nn.Module) -> None:
    _, captures = run_watched(model, X)
    assert captures.names == ["0", "1.0"]
    for layer, expected in zip(captures, compute_weights(), strict=True):
        torch.testing.assert_close(layer.weights(), expected)


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel() -> None:
    model = nn.parallel.DistributedDataParallel(build_model())
    check(model)
    with knock_out(model, {"1.0": [0]}), watch(model) as captures:
        model(X)
    assert not captures["1.0"].weights(head=0).any()
    assert captures["1.0"].weights(head=1).any()


def test_data_parallel() -> None:
    check(nn.DataParallel(build_model()))


@pytest.mark.usefixtures("process_group")
def test_fully_sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = init_device_mesh("cpu", (1,)), build_model()
    fully_shard(model[0], mesh=mesh)
    check(fully_shard(model, mesh=mesh))  # type: ignore[arg-type]


@pytest.mark.usefixtures("process_group")
def test_tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    plan = {"project": ColwiseParallel()}
    model = build_model()
    for attention in (model[0], model[1][0]):  # type: ignore[index]
        parallelize_module(attention, init_device_mesh("cpu", (1,)), plan)  # type: ignore[arg-type]
    check(model)


def test_checkpoints() -> None:
    model = build_model()
    model[1][0] = checkpoint_wrapper(model[1][0])  # type: ignore[index, operator]
    check(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantised_linear_layers() -> None:
    model = torch.ao.quantization.quantize_dynamic(build_model(), {nn.Linear}, dtype=torch.qint8)
    _, captures = run_watched(model, X)
    assert captures.names == ["0", "1.0"]
    query, key, _ = model[0].project(X).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    scores = (query @ key.mT / 3**0.5).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    torch.testing.assert_close(captures["0"].weights(), scores.softmax(-1))


def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build_model(), peft.LoraConfig(target_modules=["project"], init_lora_weights=False))
    _, captures = run_watched(model, X)
    assert captures.names == ["base_model.model.0", "base_model.model.1.0"]
    attention = model.base_model.model[0]
    query, key, _ = attention.project(X).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    scores = (query @ key.mT / 3**0.5).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    torch.testing.assert_close(captures[0].weights(), scores.softmax(-1))
