"""What really runs on a GPU, seen by the witness: sdpa's kernels, FlashAttention's packages, flex, a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pytest_cudaenv import attn_backends, attn_sdpa_kernel, dtypes, requires_cuda  # noqa: E402
from pytest_cudaenv.verdict.witness import watch  # noqa: E402

CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def llama(cell: Any, **changes: Any) -> Any:
    return cell.build(transformers.LlamaForCausalLM, transformers.LlamaConfig(**{**CONFIG, **changes}))


def ids(device: Any, length: int = 160) -> Any:
    """Long enough for flex: torch 2.11 has no kernel for the training of fewer positions than a block of 128."""
    return torch.arange(2 * length, device=device).reshape(2, length) % 128


def has_backward(error: RuntimeError) -> bool:
    """Whether a FlashAttention that failed could have had one: some builds are for inference alone."""
    return "does not support backward" not in str(error)


@attn_backends("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
@dtypes("fp16", "bf16")
def test_each_backend_runs_in_each_layer_forward_and_backward(cell: Any, attn_witness: Any) -> None:
    model = llama(cell).train()
    is_trained = True
    with attn_witness(model) as seen:
        loss = model(ids(cell.device), labels=ids(cell.device)).loss
        try:
            loss.backward()
        except RuntimeError as error:
            if has_backward(error):
                raise
            is_trained = False
    seen.assert_ran(cell.attn_backend, causal=True)
    layers = {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    assert {call.module for call in seen.calls if not call.is_backward} == layers
    if is_trained:
        assert {call.backend for call in seen.calls if call.is_backward} == {cell.attn_backend}


@attn_backends("flash_attention_2", "flash_attention_3", "flash_attention_4")
@dtypes("bf16")
def test_a_window_reaches_flash_attention(cell: Any, attn_witness: Any) -> None:
    config = transformers.MistralConfig(**CONFIG, sliding_window=16)
    model = cell.build(transformers.MistralForCausalLM, config)
    with attn_witness(model) as seen, torch.no_grad():
        model(ids(cell.device))
    seen.assert_ran(cell.attn_backend, window=16, causal=True)


def attend(device: Any, **keywords: Any) -> Any:
    q = torch.rand(2, 8, 64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True, **keywords)
    out.sum().backward()
    return out


@requires_cuda
@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, marks=attn_sdpa_kernel(kernel), id=kernel)
        for kernel in ("flash", "efficient", "cudnn", "math")
    ],
)
def test_each_kernel_of_sdpa_is_forced_and_told(cuda_device: Any, attn_witness: Any, kernel: str) -> None:
    if kernel == "cudnn" and cuda_device.capability < (8, 0):
        pytest.skip("cuDNN's attention needs Ampere")
    attend(cuda_device)
    attn_witness.assert_ran("sdpa", kernel=kernel, causal=True)


@requires_cuda
def test_torch_says_why_flash_did_not_run(cuda_device: Any, attn_witness: Any) -> None:
    q = torch.rand(2, 8, 64, 64, device=cuda_device, dtype=torch.float32)
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
    with pytest.raises(AssertionError, match=r"(?i)witness-kernel.*dtype"):
        attn_witness.assert_ran("sdpa", kernel="flash")


@requires_cuda
def test_a_cuda_graph_is_seen_while_it_is_captured(cuda_device: Any) -> None:
    q = torch.rand(2, 8, 64, 64, device=cuda_device, dtype=torch.bfloat16)

    def run() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with watch() as captured, torch.cuda.graph(graph):
        run()
    with watch() as replayed:
        graph.replay()
    torch.cuda.synchronize()
    captured.assert_ran("sdpa")
    assert replayed.calls == (), "a replay calls nothing"


@requires_cuda
def test_compiled_by_inductor(cuda_device: Any) -> None:
    def run(q: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    compiled = torch.compile(run)
    q = torch.rand(2, 8, 64, 64, device=cuda_device, dtype=torch.bfloat16)
    for _ in range(2):
        with watch() as seen:
            compiled(q)
        seen.assert_ran("sdpa")
