"""How backends are spelled, which models have them, and a project's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fabricated_hosts import codes, device, software

from pytest_cudaenv.requirements import attention
from pytest_cudaenv.requirements.attention import AttnBackend, UnknownBackendError, backend_name
from pytest_cudaenv.requirements.capability import at_least


@pytest.mark.parametrize(
    "text",
    ["fa3", "FA3", "flash_attn_3", "flash-attn-3", "flash_attn3", "flash_attention_3", "flash-attention-3", " Fa-3 "],
)
def test_spellings(text: str) -> None:
    assert backend_name(text) == "flash_attention_3"


@pytest.mark.parametrize("name", attention.BACKENDS)
def test_canonical_names_stay(name: str) -> None:
    assert backend_name(name) == name
    assert backend_name(name.upper()) == name


@pytest.mark.parametrize(
    "text",
    [
        "kernels-community/flash-attn3",
        "kernels-community/flash-attn3@main",
        "org/name:function",
        "Org/Name_1.2@v1:fn",
    ],
)
def test_hub_kernels_stay_as_they_are(text: str) -> None:
    assert backend_name(text) == text


@pytest.mark.parametrize(
    "text", ["flash_attention", "flash_attention_5", "fa", "/x", "a/b/c", "org/", "", "paged|sdpa"]
)
def test_unknown_names(text: str) -> None:
    with pytest.raises(UnknownBackendError, match="choose from eager, sdpa, flash_attention_2") as raised:
        backend_name(text)
    assert isinstance(raised.value, ValueError)


def test_a_close_name_is_offered() -> None:
    with pytest.raises(UnknownBackendError, match="did you mean 'flash_attention_3'"):
        backend_name("flash_attentoin_3")


def test_what_is_no_text_is_unknown_too() -> None:
    with pytest.raises(UnknownBackendError, match="None"):
        backend_name(None)  # type: ignore[arg-type]


class Llama:
    _supports_sdpa = True
    _supports_flash_attn = True


class Old:
    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False


class GptOss:
    _supports_sdpa = False
    _supports_flash_attn = True
    _compatible_flash_implementations = ("kernels-community/vllm-flash-attn3", "flash_attention_4")


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        (Llama, []),
        (Old, ["sdpa", "flex_attention", "flash_attention_2", "org/flash-mla"]),
        (GptOss, ["sdpa", "flash_attention_2", "org/flash-mla"]),
        (int, []),
    ],
)
def test_models(model: type, refused: list[str]) -> None:
    names = ["eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_4", "org/flash-mla", "org/other"]
    names = [n for n in names if not (model is Old and n == "flash_attention_4")]
    assert [n for n in names if attention.model_reasons(n, model)] == refused


def test_what_a_model_reason_says() -> None:
    [reason] = attention.model_reasons("flash_attention_2", Old)
    assert str(reason) == "[model-attn] FA2 needs a model with FA2; have Old"
    assert "_supports_flash_attn" in reason.remedy
    [reason] = attention.model_reasons("flash_attention_2", GptOss)
    assert "kernels-community/vllm-flash-attn3, flash_attention_4 alone" in reason.remedy


@pytest.fixture
def own_backend() -> Iterator[AttnBackend]:
    backend = AttnBackend("tree_attention", aliases=("tree",), capabilities=at_least(9, 0), runs_on_cpu=False)
    attention.with_backends({backend.name: backend})
    yield backend
    attention.with_backends({})


def test_a_project_brings_its_own(own_backend: AttnBackend) -> None:
    assert backend_name("Tree") == "tree_attention"
    assert attention.registered()["tree_attention"] is own_backend
    assert attention.software_reasons("tree_attention", software(), None) == []
    [reason] = attention.device_reasons("tree_attention", "float32", device("a10g"), software())
    assert str(reason) == "[attn-capability] tree_attention needs capability 9.0; have 8.6 (A10G)"
    assert codes(attention.device_reasons("tree_attention", None, None, software())) == ["attn-device"]
    assert attention.model_reasons("tree_attention", Old) == []


def test_own_backends_are_replaced_and_not_added(own_backend: AttnBackend) -> None:
    attention.with_backends({})
    with pytest.raises(UnknownBackendError):
        backend_name("tree_attention")


def test_stand_ins() -> None:
    assert attention.stand_ins("flash_attention_2") == ("kernels-community/flash-attn2",)
    assert attention.stand_ins("sdpa") == ()
    assert attention.stand_ins("org/name") == ()
