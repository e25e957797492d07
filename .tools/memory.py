"""Memory of one micro-batch of the update, forward and backward, on GPUs, computed without any of them:
    python .tools/memory.py 131072              # Qwen3.5-4B on 8 GPUs; or --ranks 1 --model FOLDER_OR_JSON
    python .tools/memory.py 131072 --on-gpu     # as if the inputs of blocks stayed on the GPU
Shapes only: FakeTensors and a fake process group run the project's own `shard` and `forward_logprobs`. The
kernels of a GPU (flash attention, gated delta rule, convolution) are replaced by functions that allocate and
save what those do. Not counted: CUDA's context, NCCL, what vLLM keeps while it sleeps, fragmentation.
"""

import argparse
import json
import os
import sys
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

sys.path.insert(0, str(Path(__file__).parents[1]))
KNOWN = ("qwen3", "qwen3_5", "qwen3_5_text")  # families whose kernels are replaced below


# ---- What kernels of a GPU allocate and save ---------------------------------------------------------------
class Delta(torch.autograd.Function):  # chunked gated delta rule, as flash-linear-attention's
    @staticmethod
    def forward(ctx, q, k, v, g, beta):
        B, T, H, K = q.shape
        V = v.shape[-1]
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        q_norm, k_norm = torch.empty_like(q), torch.empty_like(k)
        scale_q = q.new_empty(B, T, H, dtype=torch.float32)
        scale_k = torch.empty_like(scale_q)
        g_sum = torch.empty_like(g)
        inverse = q.new_empty(B, T, H, 64)
        work = torch.empty_like(k_norm), torch.empty_like(v), q.new_empty(B, (T + 63) // 64, H, K, V)
        work += (torch.empty_like(v),)
        out = torch.empty_like(v)
        ctx.save_for_backward(q_norm, scale_q, k_norm, scale_k, v, g_sum, beta, inverse)
        del work
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, _, k, _, v, g, beta, _ = ctx.saved_tensors
        B, T, H, K = q.shape
        d_out = d_out.contiguous()
        states = q.new_empty(B, (T + 63) // 64, H, K, v.shape[-1])
        work = [torch.empty_like(x) for x in (k, v, v, d_out, states, v, q, k, k)]
        grads = [torch.empty_like(x) for x in (q, k, v, g, beta)]
        del work
        return tuple(grads)


class Flash(torch.autograd.Function):  # attention without a [T, T] matrix
    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, _, _ = ctx.saved_tensors
        work = [q.new_empty(q.shape, dtype=torch.float32), torch.empty_like(q), torch.empty_like(q)]
        grads = [torch.empty_like(x) for x in (q, k, v)]
        del work
        return tuple(grads)


class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, d_out):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def attention(module, q, k, v, mask, **_):
    return Flash.apply(q, k, v).transpose(1, 2).contiguous(), None


def replace_kernels() -> None:
    qwen.torch_chunk_gated_delta_rule = lambda q, k, v, g, beta, **_: (Delta.apply(q, k, v, g, beta), None)
    qwen.causal_conv1d_fn = lambda x, weight, *_, **__: Convolution.apply(x, weight)
    qwen.create_causal_mask = modeling_qwen3.create_causal_mask = lambda **_: None
    qwen.create_recurrent_attention_mask = lambda **_: None
    ALL_ATTENTION_FUNCTIONS.register("sdpa", attention)


# ---- Counting ----------------------------------------------------------------------------------------------
class Counted(TorchDispatchMode):
    """Bytes of all storages that are alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.live = {}

    def add(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.live:
            weakref.finalize(storage, self.drop, key)
        self.now += storage.nbytes() - self.live.get(key, 0)
        self.live[key] = storage.nbytes()
        self.peak = max(self.peak, self.now)

    def drop(self, key):
        self.now -= self.live.pop(key)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):  # its part is counted
                self.add(leaf)
        if "resize" in str(function):  # FSDP frees and refills what it has gathered so
            self.add(args[0])
        return out


def stay(pin_memory=False):
    return nullcontext()


def leave(pin_memory=False):
    """What save_on_cpu does, for the count: a saved tensor leaves, and comes back anew."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda x: (x.shape, x.stride(), x.dtype), lambda kept: torch.empty_strided(*kept[:2], dtype=kept[2])
    )


def measure(config, tokens: int, ranks: int, on_gpu: bool) -> dict:
    """{"state": weights and moments, "peak": of forward and backward}, in GB on each rank."""
    os.environ.update(RANK="0", WORLD_SIZE=str(ranks), LOCAL_RANK="0")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    import train

    replace_kernels()
    policy = train.MixedPrecisionPolicy
    train.MixedPrecisionPolicy = lambda *_: policy(torch.bfloat16, torch.float32)  # as on a GPU
    train.fully_shard = partial(train.fully_shard, mesh=init_device_mesh("cpu", (ranks,)))
    torch.autograd.graph.save_on_cpu = stay if on_gpu else leave
    counted = Counted()
    with FakeTensorMode(allow_non_fake_inputs=True), counted:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        train.shard(model)
        moments = [torch.zeros_like(w.to_local()) for w in model.parameters() for _ in range(2)]
        state = counted.now
        counted.peak = 0
        drawn = torch.zeros(tokens // 3, dtype=torch.long)  # a third of the tokens is the policy's
        ids = torch.zeros(1, tokens, dtype=torch.long)
        logprobs, _ = model.forward_logprobs(ids, (torch.zeros_like(drawn), drawn))
        logprobs.sum().backward()
        del moments
    dist.destroy_process_group()
    return {"state": state / 1e9, "peak": counted.peak / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokens", type=int, help="length of the segment")
    parser.add_argument("--model", default="", help="folder with a config.json; empty: Qwen3.5-4B")
    parser.add_argument("--layers", type=int, default=0, help="0: all of the model's")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--on-gpu", action="store_true", help="inputs of blocks stay on the GPU")
    flags = parser.parse_args()
    if flags.model:
        config = AutoConfig.from_pretrained(flags.model)
    else:
        sizes = json.loads(Path(__file__).with_name("qwen35_4b_sizes.json").read_text())
        config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    text = config.get_text_config()
    if flags.layers:
        text.num_hidden_layers = flags.layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[: flags.layers]
    figures = measure(config, flags.tokens, flags.ranks, flags.on_gpu)
    where = "on the GPU" if flags.on_gpu else "on the CPU"
    print(
        f"{flags.tokens} tokens, {flags.ranks} ranks, {text.num_hidden_layers} layers, inputs {where}: ",
        end="",
    )
    print(f"weights and moments {figures['state']:.1f} GB, peak {figures['peak']:.1f} GB on each rank")


if __name__ == "__main__":
    main()
