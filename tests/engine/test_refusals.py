"""What cannot be served refuses to start, and says which setting, which value and what to do."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kvferry.app.engines.embedded.engine import EmbeddedEngine
from kvferry.app.engines.embedded.model import load_model
from kvferry.app.engines.embedded.tokenizer import CheckpointTokenizer, NoTokenizer
from kvferry.app.settings import Settings
from kvferry.core.errors import StartError
from tests.harness.checkpoints import SMALL


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "/no/such/folder"}, "MODEL=/no/such/folder does not load: "),
        ({"device": "cuda:99"}, "DEVICE=cuda:99"),
        ({"device_blocks": 1 << 40}, "DEVICE_BLOCKS asks for 36,028,797,018,963,968 bytes"),
    ],
)
def test_a_bad_setting_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(StartError, match=message.replace("(", r"\(")):
        EmbeddedEngine(Settings.model_construct(**settings))  # type: ignore[arg-type]


class StubbornConfig(LlamaConfig):
    model_type = "kvferry_test_stubborn"


class StubbornForCausalLM(LlamaForCausalLM):
    """Counts positions for itself, from 0 in every call: right on its own, wrong over a paged cache."""

    config_class = StubbornConfig

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **more: object) -> object:
        return super().forward(input_ids=input_ids, position_ids=None, **more)


AutoConfig.register(StubbornConfig.model_type, StubbornConfig)
AutoModelForCausalLM.register(StubbornConfig, StubbornForCausalLM)


def small_models() -> dict[str, tuple[PreTrainedModel, str]]:
    latent = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return {
        "mamba": (
            MambaForCausalLM(MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2)),
            "linear_attention",
        ),
        "t5": (T5ForConditionalGeneration(T5Config(vocab_size=300, d_model=32, num_layers=1)), "encoder-decoder"),
        "latent": (DeepseekV3ForCausalLM(DeepseekV3Config(**SMALL, **latent, n_routed_experts=8)), "MLA"),
        "softcap": (Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=16)), "caps attention scores"),
        "dynamic": (LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=rope)), "rope type dynamic"),
        "sinks": (GptOssForCausalLM(GptOssConfig(**SMALL, head_dim=16, num_local_experts=4)), "attention sinks"),
        "falcon": (
            FalconForCausalLM(FalconConfig(vocab_size=300, hidden_size=48, num_hidden_layers=1, num_attention_heads=4)),
            "cannot be replaced",
        ),
        "recurrent": (
            RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**SMALL)),
            "0 of its 2 layers are plain attention",
        ),
        "stubborn": (StubbornForCausalLM(StubbornConfig(**SMALL)), "paged attention differs from its own attention by"),
    }


@pytest.mark.parametrize(
    "name", ["mamba", "t5", "latent", "softcap", "dynamic", "sinks", "falcon", "recurrent", "stubborn"]
)
def test_a_model_without_plain_attention_is_refused(name: str, tmp_path: Path) -> None:
    module, message = small_models()[name]
    module.save_pretrained(tmp_path)
    with pytest.raises(StartError, match=message) as refused:
        EmbeddedEngine(Settings.model_construct(model=str(tmp_path), device="cpu"))
    assert str(tmp_path) in str(refused.value)


def test_tiny_logs_that_it_is_untrained(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine = EmbeddedEngine(Settings.model_construct(device="cpu", device_blocks=8))
    assert "UNTRAINED" in caplog.text
    assert (engine.model.context_tokens, engine.max_model_len) == (8192, 8 * 16)
    assert engine.block_bytes == engine.cache.blocks.shape[1] == 32 * 1024
    assert engine.cache.blocks.is_contiguous()


def test_tiny_is_the_same_everywhere() -> None:
    one, other = (load_model("tiny", "cpu", dtype) for dtype in ("float32", "float64"))
    for (name, weight), (_, double) in zip(one.module.named_parameters(), other.module.named_parameters(), strict=True):
        assert torch.equal(weight.double(), double), name
    assert float(one.module.lm_head.weight.double().sum()) == pytest.approx(KNOWN_SUM, abs=1e-3)


KNOWN_SUM = -17.74336


@pytest.mark.parametrize("name", ["qwen2", "mistral"])
def test_a_folder_without_a_tokenizer_serves_token_ids(
    name: str, checkpoints: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(checkpoints[name], "cpu")
    assert isinstance(model.tokenizer, NoTokenizer)
    assert "prompts must be token ids" in caplog.text
    assert isinstance(load_model(checkpoints["llama"], "cpu").tokenizer, CheckpointTokenizer)
