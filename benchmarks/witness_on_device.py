"""What each attention backend shows of itself on a GPU: operators, kernels, the witness's verdict, and CUDA graphs.

One line of JSON per backend. `dispatched`: operators a TorchDispatchMode sees; `kernels`: names of the GPU's kernels as
torch.profiler reports them; `witnessed`: what the witness made of it, forward and backward; `graph`: the same while a
CUDA graph is captured, and what is seen of its replay. Needs a GPU, torch, transformers; FlashAttention's packages
count where they are installed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

BACKENDS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
KERNELS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
TELLING = ("attention", "attn", "flash", "fmha", "sdpa", "softmax", "flex", "cudnn")


def llama(backend: str, kv_heads: int = 2) -> Any:
    """Two layers in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        vocab_size=128,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation=backend, dtype=torch.bfloat16).cuda()


def shown(call: Callable[[], Any]) -> Any:
    """What `call` returns, or the first line of its error."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"


def dispatched(step: Callable[[], Any]) -> list[str]:
    """Operators by a dispatch mode of torch's, those whose name tells of attention."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: set[str] = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(str(func))
            return func(*args, **(kwargs or {}))

    with Names():
        step()
    return sorted(name for name in seen if any(word in name.lower() for word in TELLING))


def kernels(step: Callable[[], Any]) -> list[str]:
    """Names of the device's kernels by torch.profiler, those that tell of attention."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    names = {event.name[:120] for event in seen.events()}
    return sorted(name for name in names if any(word in name.lower() for word in TELLING))


def witnessed(step: Callable[[], Any]) -> list[str]:
    """The calls that the witness saw: backend, kernel, direction, module."""
    from pytest_cudaenv.verdict.witness import watch

    with watch() as seen:
        step()
    return sorted(
        {f"{call.backend}/{call.kernel}{' backward' if call.is_backward else ''} {call.module}" for call in seen.calls}
    )


def graphed(forward: Callable[[], Any]) -> dict[str, Any]:
    """What is seen of a capture and of its replay."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward()
        forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph):
            forward()

    return {
        "capture": witnessed(capture),
        "replay": witnessed(graph.replay),
        "replay kernels": kernels(graph.replay),
    }


def look(backend: str, *, force: contextlib.AbstractContextManager[Any] | None = None) -> dict[str, Any]:
    """All that a backend shows."""
    import torch

    # torch 2.11's memory-efficient kernel does not share keys.
    model = llama(backend, kv_heads=2 if force is None else 8)
    ids = torch.arange(320, device="cuda").reshape(2, 160) % 128

    def forward() -> None:
        with torch.no_grad():
            model(ids, use_cache=False)

    is_trained = True

    def step() -> None:
        loss = model(ids, labels=ids, use_cache=False).loss
        if is_trained:
            loss.backward()

    with force or contextlib.nullcontext():
        try:
            step()
        except RuntimeError as error:
            if "does not support backward" not in str(error):
                raise
            is_trained = False
        compiled = torch.compile(model)

        def run_compiled() -> None:
            loss = compiled(ids, labels=ids, use_cache=False).loss
            if is_trained:
                loss.backward()

        return {
            "has backward": is_trained,
            # flex fails under the first two, and may do so afterwards.
            "witnessed": shown(lambda: witnessed(step)),
            "graph": shown(lambda: graphed(forward)),
            "compiled": shown(lambda: witnessed(run_compiled)),
            "dispatched": shown(lambda: dispatched(step)),
            "kernels": shown(lambda: kernels(step)),
        }


def main() -> None:
    """Print a line per backend, and one per forced kernel of sdpa."""
    import torch
    import transformers
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({**found, "device": torch.cuda.get_device_name()}), flush=True)
    for backend in BACKENDS:
        print(json.dumps({"backend": backend, "shows": shown(lambda b=backend: look(b))}), flush=True)
    for kernel in KERNELS:
        force = sdpa_kernel(getattr(SDPBackend, kernel))
        print(json.dumps({"sdpa": kernel, "shows": shown(lambda f=force: look("sdpa", force=f))}), flush=True)


if __name__ == "__main__":
    main()
