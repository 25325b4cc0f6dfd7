"""The towers against their definition written out, and the contract of every OpenCLIP hook that they override."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from open_clip.transformer import TextTransformer, VisionTransformer

from prolip.models.towers import ProbabilisticTextTransformer, ProbabilisticVisionTransformer, SelfAttention

VISION = {"image_size": 16, "patch_size": 4, "width": 16, "layers": 2, "heads": 2, "mlp_ratio": 2.0, "output_dim": 12}
TEXT = {"context_length": 7, "vocab_size": 30, "width": 16, "heads": 2, "layers": 2, "mlp_ratio": 2.0}
TEXT |= {"output_dim": 12, "proj_bias": True}


def vision(seed=0, **kwargs):
    torch.manual_seed(seed)
    return ProbabilisticVisionTransformer(**(VISION | kwargs))


def text_tower(seed=0, **kwargs):
    torch.manual_seed(seed)
    return ProbabilisticTextTransformer(**(TEXT | kwargs))


def images(count=3, seed=1, size=16):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def texts(count=3, length=7, seed=1):
    return torch.randint(2, 30, (count, length), generator=torch.Generator().manual_seed(seed))


BOTH = pytest.mark.parametrize("make, inputs", [(vision, images), (text_tower, texts)])


# --- the definition ---------------------------------------------------------------------------------------------------


def blocks_by_hand(x, transformer, heads):
    """Pre-norm residual blocks with explicit softmax attention."""
    for block in transformer.resblocks:
        h = F.layer_norm(x, x.shape[-1:], block.ln_1.weight, block.ln_1.bias)
        q, k, v = (h @ block.attn.in_proj_weight.t() + block.attn.in_proj_bias).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in (q, k, v))
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        x = x + block.attn.out_proj((weights @ v).transpose(1, 2).flatten(2))
        h = F.layer_norm(x, x.shape[-1:], block.ln_2.weight, block.ln_2.bias)
        x = x + block.mlp.c_proj(F.gelu(block.mlp.c_fc(h)))
    return x


def test_image_tower_is_cls_unc_patches_through_a_vit_with_a_head_on_each_special_token():
    tower, x = vision().double(), images().double()
    patches = [
        tower.conv1.weight.flatten(1) @ x[:, :, r : r + 4, c : c + 4].flatten(1).t()
        for r in range(0, 16, 4)
        for c in range(0, 16, 4)
    ]
    tokens = [tower.class_embedding.expand(3, -1), tower.unc_embedding.expand(3, -1), *(p.t() for p in patches)]
    y = tower.ln_pre(torch.stack(tokens, 1) + tower.positional_embedding)
    y = tower.ln_post(blocks_by_hand(y, tower.transformer, 2))
    mean = y[:, 0] @ tower.proj
    z = tower(x)
    torch.testing.assert_close(z.mean, mean / mean.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(z.log_var, y[:, 1] @ tower.uncertainty_proj.weight.t() + tower.uncertainty_proj.bias)
    torch.testing.assert_close(tower(x, normalize=False).mean, mean)


def test_text_tower_is_tokens_unc_cls_without_a_causal_mask_with_a_head_on_each_special_token():
    tower, ids = text_tower().double(), texts()
    tokens = torch.cat(
        [tower.token_embedding(ids), tower.unc_emb.expand(3, 1, -1), tower.cls_emb.expand(3, 1, -1)], dim=1
    )
    y = tower.ln_final(blocks_by_hand(tokens + tower.positional_embedding, tower.transformer, 2))
    mean = tower.text_projection(y[:, -1])
    z = tower(ids)
    torch.testing.assert_close(z.mean, mean / mean.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(
        z.log_var, F.linear(y[:, -2], tower.text_uncertainty_projection.weight, tower.text_uncertainty_projection.bias)
    )


@BOTH
def test_released_form_differs_from_the_papers(make, inputs):
    paper, released = make(), make(form="released")
    state = paper.state_dict()
    if make is text_tower:  # its log-variance head reads the mean, not [UNC]
        assert released.text_uncertainty_projection.in_features == TEXT["output_dim"]
        state = {k: v for k, v in state.items() if not k.startswith("text_uncertainty")}
    released.load_state_dict(state, strict=False)
    # ln_post twice is once, as long as its weight is 1 and its bias 0
    for tower in (paper, released):
        torch.manual_seed(3)
        torch.nn.init.normal_(tower.ln_post.weight if make is vision else tower.ln_final.weight)
    a, b = paper(inputs()), released(inputs())
    differs = (a.mean - b.mean) if make is vision else (a.log_var - b.log_var)
    assert differs.abs().max() > 1e-3
    if make is vision:
        torch.testing.assert_close(a.log_var, b.log_var)
    else:
        torch.testing.assert_close(a.mean, b.mean)


# --- patches that are dropped -----------------------------------------------------------------------------------------


def keep_subsets(batch, patches, kept, seed=5):
    return torch.rand(batch, patches, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :kept]


@pytest.mark.parametrize("size", [16, 18])
def test_dropping_before_the_projection_equals_embedding_all_and_selecting(size):
    """Also of images that are no whole number of patches: SO400M's 384 pixels leave 6 over."""
    tower, x = vision(image_size=size).double(), images(size=size).double()
    keep = keep_subsets(3, tower.num_patches, 5)
    every = tower._embeds(x)
    assert every.shape[1] == 2 + 16
    chosen = torch.cat([every[:, :2], every[torch.arange(3)[:, None], keep + 2]], dim=1)
    torch.testing.assert_close(tower._embeds(x, keep), chosen)
    whole = tower.pooled(tower.transformer(chosen)) @ tower.proj
    torch.testing.assert_close(tower(x, keep, normalize=False).mean, whole)


def test_each_image_has_its_own_subset_and_keeping_all_in_order_changes_nothing():
    tower, x = vision().double(), images(2).double()
    keep = keep_subsets(2, tower.num_patches, 4)
    assert not torch.equal(keep[0].sort().values, keep[1].sort().values)
    both = tower(x, keep).mean
    for i in range(2):
        torch.testing.assert_close(tower(x[i : i + 1], keep[i : i + 1]).mean[0], both[i])
    every = torch.arange(tower.num_patches).expand(2, -1)
    torch.testing.assert_close(tower(x, every).mean, tower(x).mean)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"image_size": 3}, "image_size 3 is below the patch_size 4: .*enlarge"),
        ({"image_size": (16, 0)}, "image_size .16, 0. is below the patch_size 4"),
        ({"image_size": 18, "conv_stem": True}, "square patches that divide image_size 18: got patch_size 4"),
        (
            {"patch_size": (4, 8), "conv_stem": True},
            r"square patches that divide image_size .*: got patch_size \(4, 8\)",
        ),
        ({"patch_dropout": 0.5}, "patch_dropout is not supported .*keep="),
        ({"attentional_pool": True}, "attentional_pool"),
        ({"pool_type": "none"}, "choose tok"),
    ],
)
def test_a_grid_that_cannot_be_and_options_that_cannot_hold_unc_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        vision(**changes)


# --- padding ----------------------------------------------------------------------------------------------------------


def padded(length, pad=0):
    ids = texts(2, 7)
    ids[0, 3:] = pad
    ids[1, 4:] = pad
    return ids[:, :length]


@pytest.mark.parametrize("training", [True, False])
def test_true_masking_makes_a_text_independent_of_how_far_it_is_padded(training):
    tower = text_tower(mask_padding=True, pad_id=0).train(training)
    with torch.set_grad_enabled(training):
        for a, b in zip(tower(padded(7)), tower(padded(4))):
            torch.testing.assert_close(a, b)
        one = tower(padded(7)[:1, :3])
    torch.testing.assert_close(tower(padded(7)).mean[:1], one.mean)


def test_the_mask_hides_trailing_padding_only_and_never_a_special_token():
    tower = text_tower(mask_padding=True, pad_id=0)
    ids = torch.tensor([[5, 0, 6, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
    mask = tower.padding_mask(ids, torch.float32).unflatten(0, (2, 2))
    assert mask.shape == (2, 2, 9, 9)
    visible = mask[:, 0, 0] == 0
    assert visible.tolist() == [[True, True, True, False, False, False, False, True, True], [False] * 7 + [True] * 2]
    assert tower(ids).mean.isfinite().all()


# --- heads ------------------------------------------------------------------------------------------------------------


@BOTH
def test_initial_variance_is_exp_of_the_bias_on_average(make, inputs):
    tower = make(width=128, output_dim=128, init_unc_bias=-10.0)
    log_var = tower(inputs(8)).log_var
    assert log_var.exp().mean().item() == pytest.approx(math.exp(-10), rel=0.05)
    assert 0.03 < log_var.std() < 0.2  # not constant either: [UNC] is connected


@BOTH
def test_heads_and_normalisation_run_in_float32_under_autocast(make, inputs):
    tower, x = make(), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        z = tower(x)
    assert z.mean.dtype == z.log_var.dtype == torch.float32
    torch.testing.assert_close(z.mean.norm(dim=-1), torch.ones(3), atol=1e-6, rtol=0)
    exact = tower(x)
    torch.testing.assert_close(z.mean, exact.mean, atol=0.05, rtol=0)
    # a log variance rounded to bfloat16 would lie on a grid of 1/16 near -10
    assert ((z.log_var * 16) % 1).std() > 0.1


@BOTH
def test_gradient_checkpointing_changes_nothing(make, inputs):
    tower, x = make(), inputs()
    names = [name for name, _ in tower.named_parameters()]

    def gradients():
        z = tower(x)
        return torch.autograd.grad((z.mean[:, 0] + z.log_var[:, 1]).sum(), list(tower.parameters()))

    plain = gradients()
    tower.set_grad_checkpointing(True)
    assert tower.transformer.grad_checkpointing
    for name, a, b in zip(names, plain, gradients()):
        torch.testing.assert_close(a, b, msg=name)


# --- OpenCLIP's traps -------------------------------------------------------------------------------------------------


def test_average_pooling_leaves_unc_and_cls_out():
    tower = vision(pool_type="avg").double()
    y = tower.transformer(tower._embeds(images().double()))
    pooled = tower.pooled(y)
    torch.testing.assert_close(pooled, tower.ln_post(y)[:, 2:].mean(1))
    y[:, :2] = 100.0
    torch.testing.assert_close(tower.pooled(y), pooled)


@pytest.mark.parametrize("make", [vision, text_tower])
def test_intermediate_tokens_are_refused_with_what_to_do(make):
    for call in (make().forward_intermediates, make().prune_intermediate_layers):
        with pytest.raises(NotImplementedError, match="register hooks on tower.blocks"):
            call(1)


@pytest.mark.parametrize("make, head", [(vision, "proj"), (text_tower, "text_projection.weight")])
def test_locking_covers_the_uncertainty_branch(make, head):
    tower = make()
    tower.lock(0)
    assert not any(p.requires_grad for p in tower.parameters())
    tower.lock(1)
    trained = {name for name, p in tower.named_parameters() if p.requires_grad}
    assert head in trained
    ours = {id(p) for p in tower.uncertainty_parameters()}
    assert len(ours) == 3
    assert {name for name, p in tower.named_parameters() if id(p) in ours} <= trained
    assert "positional_embedding" not in trained and not any("resblocks" in name for name in trained)


def test_fixed_positions_stay_fixed():
    tower = vision(pos_embed_type="sin_cos_2d")
    assert not tower.positional_embedding.requires_grad
    assert tower.positional_embedding[1].abs().sum() == 0
    plain = VisionTransformer(**VISION, pos_embed_type="sin_cos_2d").positional_embedding
    torch.testing.assert_close(tower.positional_embedding[2:], plain[1:])


# --- the contract with OpenCLIP ---------------------------------------------------------------------------------------

HOOKS = {"no_weight_decay": [], "set_grad_checkpointing": ["enable"]}
IMAGE_HOOKS = {"_embeds": ["x"], "forward": ["x"]}
IMAGE_HOOKS |= HOOKS | {"lock": ["unlocked_groups", "freeze_bn_stats"]}
TEXT_HOOKS = HOOKS | {"_embeds": ["text"], "forward": ["text"], "lock": ["unlocked_layers", "freeze_layer_norm"]}
SIGNATURES = {(VisionTransformer, hook): ["self", *names] for hook, names in IMAGE_HOOKS.items()}
SIGNATURES |= {(TextTransformer, hook): ["self", *names] for hook, names in TEXT_HOOKS.items()}


@pytest.mark.parametrize("owner, hook", SIGNATURES, ids=lambda value: getattr(value, "__name__", value))
def test_openclips_hooks_have_the_signatures_that_are_overridden_here(owner, hook):
    wanted = SIGNATURES[owner, hook]
    assert list(inspect.signature(getattr(owner, hook)).parameters) == wanted
    ours = {VisionTransformer: ProbabilisticVisionTransformer, TextTransformer: ProbabilisticTextTransformer}[owner]
    extended = list(inspect.signature(getattr(ours, hook)).parameters)
    assert extended[: len(wanted)] == wanted  # callers of OpenCLIP's hook can call ours


def test_our_parameters_are_openclips_and_the_uncertainty_branch():
    text = TextTransformer(**TEXT, embed_cls=True, no_causal_mask=True, pool_type="last")
    for ours, theirs, token, head in (
        (vision(), VisionTransformer(**VISION), "unc_embedding", "uncertainty_proj"),
        (text_tower(), text, "unc_emb", "text_uncertainty_projection"),
    ):
        own, plain = set(ours.state_dict()), set(theirs.state_dict())
        assert own - plain == {token, f"{head}.weight", f"{head}.bias"} and plain <= own


@pytest.mark.parametrize("mask", [None, "causal", "a row's own"])
def test_attention_without_copies_is_that_of_torch(mask):
    attention = vision().double().blocks[0].attn
    x = torch.randn(3, 7, 16, dtype=torch.float64, requires_grad=True)
    own = torch.randn(3 * attention.num_heads, 7, 7, dtype=torch.float64)
    added = {"causal": own.new_full((7, 7), -torch.inf).triu(1), "a row's own": own}.get(mask)
    want, got = attention(x, x, x, need_weights=False, attn_mask=added)[0], attention.attend(x, added)
    torch.testing.assert_close(got, want)
    toward, leaves = torch.randn_like(want), [x, *attention.parameters()]
    for mine, theirs in zip(*(torch.autograd.grad(z, leaves, toward) for z in (got, want))):
        torch.testing.assert_close(mine, theirs)


def outputs_and_gradients(tower, x, device="cpu"):
    """Return mean, log variance, and the gradients of all parameters of a tower in float64."""
    z = tower.double().to(device)(x.to(device))
    gradients = torch.autograd.grad(z.mean.pow(3).sum() + z.log_var.sum(), list(tower.parameters()))
    return [part.cpu() for part in (*z, *gradients)]


def both_towers(masked):
    """Each with a batch; again with the same weights and numbers."""
    pixels, ids = images().double(), torch.randint(1, 30, (3, 7), generator=torch.Generator().manual_seed(0))
    return (vision(), pixels), (text_tower(mask_padding=masked), ids)


@pytest.mark.parametrize("masked", [False, True])
def test_what_towers_do_on_cuda_is_what_they_do_on_the_cpu(monkeypatch, masked):
    """A CPU's tensors pass for those of a GPU."""
    wanted = [outputs_and_gradients(*tower) for tower in both_towers(masked)]
    called, attend = [], SelfAttention.attend
    monkeypatch.setattr(SelfAttention, "attend", lambda *given: called.append(1) or attend(*given))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    found = [outputs_and_gradients(*tower) for tower in both_towers(masked)]
    monkeypatch.undo()
    assert len(called) == 4  # blocks
    torch.testing.assert_close(found, wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("masked", [False, True])
def test_on_cuda_the_towers_are_those_of_the_cpu(masked):
    found, wanted = (
        [outputs_and_gradients(*tower, device) for tower in both_towers(masked)] for device in ("cuda", "cpu")
    )
    torch.testing.assert_close(found, wanted)
