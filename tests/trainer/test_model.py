"""The model against a plain reference, its loss against torch's, its first weights, its counts."""

import math

import pytest
import torch
import torch.nn.functional as F

from gristmill.trainer.config import PRESETS, ModelShape, TrainConfig, TrainError
from gristmill.trainer.loss import token_nll, token_nll_each
from gristmill.trainer.model import Llama, count_parameters, flops_per_token, initialise, parameter_shapes

TINY = ModelShape(width=32, layers=2, heads=4, kv_heads=2, hidden=48, vocab_size=50, init_std=0.2)


def make(shape: ModelShape = TINY, seed: int = 3, dtype: torch.dtype = torch.float32) -> Llama:
    model = Llama(shape.resolved(shape.vocab_size), dtype)
    initialise(model, seed)
    return model


def reference(model: Llama, ids: list[int]) -> torch.Tensor:
    """Llama written out for one sequence, position by position and head by head: (positions, vocab)."""
    shape, weights = model.shape, dict(model.named_parameters())
    head_width = shape.width // shape.heads

    def norm(x, gain):
        return x / torch.sqrt((x * x).mean() + shape.norm_eps) * gain

    def turn(x, position):
        half, out = head_width // 2, x.clone()
        for i in range(half):
            angle = position / shape.rope_base ** (2 * i / head_width)
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    xs = [weights["embed_tokens.weight"][i] for i in ids]
    for n in range(shape.layers):
        w = {k.split(".", 2)[2]: v for k, v in weights.items() if k.startswith(f"layers.{n}.")}
        queries, keys, values = [], [], []
        for position, x in enumerate(xs):
            h = norm(x, w["input_layernorm.weight"])
            q = (w["self_attn.q_proj.weight"] @ h).view(shape.heads, head_width)
            k = (w["self_attn.k_proj.weight"] @ h).view(shape.kv_heads, head_width)
            if shape.qk_norm:
                q = torch.stack([norm(row, w["self_attn.q_norm.weight"]) for row in q])
                k = torch.stack([norm(row, w["self_attn.k_norm.weight"]) for row in k])
            queries.append([turn(row, position) for row in q])
            keys.append([turn(row, position) for row in k])
            values.append((w["self_attn.v_proj.weight"] @ h).view(shape.kv_heads, head_width))
        after = []
        for position, x in enumerate(xs):
            heads = []
            for head in range(shape.heads):
                kv = head * shape.kv_heads // shape.heads
                scores = torch.stack([queries[position][head] @ keys[p][kv] for p in range(position + 1)])
                share = torch.softmax(scores / math.sqrt(head_width), 0)
                heads.append(sum(share[p] * values[p][kv] for p in range(position + 1)))
            y = x + w["self_attn.o_proj.weight"] @ torch.cat(heads)
            h = norm(y, w["post_attention_layernorm.weight"])
            gate = w["mlp.gate_proj.weight"] @ h
            after.append(y + w["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * (w["mlp.up_proj.weight"] @ h)))
        xs = after
    out = weights.get("lm_head.weight", weights["embed_tokens.weight"])
    return torch.stack([out @ norm(x, weights["norm.weight"]) for x in xs])


@pytest.mark.parametrize(
    "change", [{}, {"qk_norm": True}, {"tied": False}, {"kv_heads": 4}, {"kv_heads": 1, "rope_base": 100.0}]
)
def test_logits_equal_a_model_written_out_by_hand(change):
    model = make(TINY.model_copy(update=change))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)  # gains of 1 would hide a missing one
        ids = [7, 3, 3, 49, 0, 12]
        torch.testing.assert_close(model.logits(torch.tensor([ids]))[0], reference(model, ids), atol=1e-5, rtol=1e-4)


def test_a_masked_document_is_what_it_is_alone():
    model = make(TINY.model_copy(update={"init_std": 0.5}))
    first, second = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[9, 8, 7]])
    both = torch.cat([first, second], dim=1)
    documents = torch.tensor([[0] * 5 + [1] * 3])
    with torch.no_grad():
        together = model.logits(both, documents)[0]
        apart = torch.cat([model.logits(first)[0], model.logits(second)[0]])
        unmasked = model.logits(both)[0]
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)
    assert (unmasked[5:] - apart[5:]).abs().max() > 1e-2  # or the mask proves nothing


def plain_loss(hidden, weight, targets, z_loss):
    logits = hidden @ weight.T
    valid = targets >= 0
    nll = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    penalty = torch.logsumexp(logits, 1)[valid].square().sum()
    return nll, penalty, nll + z_loss * penalty


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("rows", [5, 700])
def test_fused_loss_equals_torch(rows, z_loss, monkeypatch):
    monkeypatch.setattr("gristmill.trainer.loss.PROJECT_ROWS", 40)
    monkeypatch.setattr("gristmill.trainer.loss.GRADIENT_LOGITS", 130 * 37)
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 16, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(37, 16, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(-1, 37, (rows,), generator=generator).clamp_min(-1)
    nll, penalty, total = plain_loss(hidden, weight, targets, z_loss)
    expected = torch.autograd.grad(total, (hidden, weight))
    ours, our_penalty = token_nll(hidden, weight, targets, z_loss)
    got = torch.autograd.grad(ours * 3, (hidden, weight))
    torch.testing.assert_close(ours.double(), nll, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_penalty.double(), penalty, rtol=1e-5, atol=1e-5)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b * 3, rtol=1e-4, atol=1e-5)
    each = token_nll_each(hidden.detach(), weight.detach(), targets)
    torch.testing.assert_close(
        each.double(),
        F.cross_entropy(hidden @ weight.T, targets, ignore_index=-1, reduction="none").detach(),
        rtol=1e-5,
        atol=1e-5,
    )


def test_loss_that_is_no_number_is_not_hidden():
    hidden = torch.zeros(3, 4)
    hidden[1, 0] = math.nan
    nll, _ = token_nll(hidden.requires_grad_(), torch.ones(5, 4), torch.tensor([1, 2, 3]))
    assert math.isnan(nll.item())
    ignored, _ = token_nll(hidden, torch.ones(5, 4), torch.tensor([1, -1, 3]))
    assert math.isclose(ignored.item(), 2 * math.log(5), rel_tol=1e-6)


def test_first_weights_depend_on_seed_and_name_only():
    one, again, other = make(seed=1), make(seed=1), make(seed=2)
    deeper = make(TINY.model_copy(update={"layers": 3, "vocab_size": 50}), seed=1)
    a, b, c, d = (dict(m.named_parameters()) for m in (one, again, other, deeper))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["embed_tokens.weight"], c["embed_tokens.weight"])
    assert torch.equal(a["layers.1.mlp.up_proj.weight"], d["layers.1.mlp.up_proj.weight"])
    assert not torch.equal(a["layers.0.mlp.up_proj.weight"], a["layers.1.mlp.up_proj.weight"])
    assert math.isclose(a["embed_tokens.weight"].std().item(), 0.2, rel_tol=0.05)
    assert math.isclose(a["layers.0.mlp.down_proj.weight"].std().item(), 0.2 / math.sqrt(4), rel_tol=0.05)
    assert (a["norm.weight"] == 1).all()


def test_counts():
    # 50*32 + 2 * (32*32 q + 2 * 16*32 k, v + 32*32 o + 3 * 48*32 + 2*32 gains) + 32 gain
    assert count_parameters(TINY) == 50 * 32 + 2 * (1024 + 1024 + 1024 + 4608 + 64) + 32
    assert flops_per_token(TINY, 10) == 6 * count_parameters(TINY) + 6 * 2 * 32 * 10
    untied = TINY.model_copy(update={"tied": False})
    assert count_parameters(untied) == count_parameters(TINY) + 50 * 32
    assert flops_per_token(untied, 10) == flops_per_token(TINY, 10)


@pytest.mark.parametrize(
    ("preset", "vocab", "millions"),
    [
        ("1m", 8192, 1.1),
        ("3m", 8192, 2.9),
        ("124m", 50257, 123.5),
        ("411m-1x", 8192, 411.6),  # DCLM's params
        ("1b-1x", 8192, 1440),
        ("1.8b", 8192, 1714),  # tied; FineWeb says 1.82 B, which is with the embedding counted twice
        ("8b", 8192, 8030),
    ],
)
def test_presets_have_the_size_that_they_are_named_for(preset, vocab, millions):
    assert count_parameters(PRESETS[preset].resolved(vocab)) / 1e6 == pytest.approx(millions, rel=0.02)


def test_names_are_those_of_hugging_face():
    shape = TINY.model_copy(update={"tied": False, "layers": 1})
    assert [name for name, _ in parameter_shapes(shape)] == [
        "embed_tokens.weight",
        "layers.0.input_layernorm.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.v_proj.weight",
        "layers.0.self_attn.o_proj.weight",
        "layers.0.post_attention_layernorm.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.0.mlp.down_proj.weight",
        "norm.weight",
        "lm_head.weight",
    ]


def test_bf16_is_close_to_float32():
    ids = torch.arange(40).view(2, 20)
    exact, rough = make(), make(dtype=torch.bfloat16)
    a, _ = exact(ids[:, :-1], ids[:, 1:])
    b, _ = rough(ids[:, :-1], ids[:, 1:])
    assert b.item() == pytest.approx(a.item(), rel=0.02)
    b.backward()
    assert rough.embed_tokens.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "7m", "steps": 1}, "there is no model preset '7m'; presets: 1m"),
        ({"steps": 1, "budget_tokens": 10**6}, "give one of steps and budget_tokens"),
        ({}, "give one of steps and budget_tokens"),
        ({"steps": 1, "batch_windows": 3, "ranks": 2}, "batch_windows 3 must be a multiple of ranks 2"),
        ({"budget_tokens": 100}, "less than one step of 32 windows x 256 tokens"),
        ({"steps": 1, "model": {"width": 30, "heads": 4}}, "width 30 must be an even multiple of heads 4"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.model_validate(settings)


def test_a_vocabulary_too_small_is_refused():
    with pytest.raises(TrainError, match="vocabulary of 50, the tokenizer one of 51"):
        TINY.resolved(51)
    assert TINY.resolved(20).vocab_size == 50


@pytest.mark.parametrize(
    ("preset", "vocab", "published", "tolerance"),
    [
        ("124m", 50_257, 124.44e6, 0.01),  # GPT-2 small has positions, biases and no gates: 0.7 % more
        ("411m-1x", 0, 411.6e6, 0.0005),  # DCLM, training/README: 411.6 M
        ("1b-1x", 0, 1.44e9, 0.005),  # the same: 1.44 B
        ("1.8b", 0, 1.71e9, 0.005),  # FineWeb's blog has 1.82 B, which counts the tied matrix twice: see below
        ("8b", 0, 8_030_261_248, 0),  # Llama 3.1 8B
    ],
)
def test_presets_have_the_published_numbers_of_parameters(preset, vocab, published, tolerance):
    shape = PRESETS[preset]
    assert count_parameters(shape.resolved(vocab or shape.vocab_size)) == pytest.approx(published, rel=tolerance, abs=0)


def test_published_counts_that_are_counted_otherwise():
    fineweb = PRESETS["1.8b"].resolved(0)
    assert count_parameters(fineweb) + fineweb.vocab_size * fineweb.width == pytest.approx(1.82e9, rel=0.005)
    olmix = PRESETS["olmix-14m"].resolved(0)
    assert count_parameters(olmix) - olmix.vocab_size * olmix.width == pytest.approx(14e6, rel=0.01)
