"""VACSR (anonymous, under review): similarity as a latent variable of every pair, by a variational adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from prolip.gaussian import Gaussian, check_pair, upcast, without_autocast
from prolip.losses import tiled_loss_over_ranks
from prolip.methods.base import Batch, Context, Method, Reps, Terms
from prolip.methods.gaussians import HeadsConfig, HeadsObjective, begin_as
from prolip.models.heads import GeneralisedPooling, Tokens, layer_norm, project
from prolip.random import Stream, pair_noise
from prolip.scores import Score
from prolip.utils.fields import option
from prolip.utils.flags import check_choices, check_range

ComponentNoise = Literal["independent", "shared"]


@dataclass(kw_only=True)
class VACSRConfig(HeadsConfig):
    """Weights and sizes of VACSR; symbols as in the paper."""

    kl_weight: float = option(5e-4, "alpha, weight of the divergence of pairs' Gaussians from N(0, I), mean over all")
    recon_weight: float = option(1.0, "beta, weight of the reconstruction and the variance loss")
    sigma_weight: float = option(1.0, "gamma, weight of the variance loss of matches and hardest negatives")
    mixture_components: int = option(2, "K, Gaussians per pair")
    component_noise: ComponentNoise = option(
        "independent", "independent: a sample of each Gaussian, mixed (3.1); shared: one normal vector for all"
    )
    gumbel_temperature: float = option(0.5, "temperature of the softmax that picks a Gaussian; near 0: only one")
    adapter_hidden: int = option(256, "hidden width of encoder and decoder; not stated in the paper")
    pair_tile: int = option(64, "images and texts per tile of pairs in the adapter; bounds its memory")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "kl_weight", "recon_weight", "sigma_weight")
        check_range(self, "mixture_components", "adapter_hidden", "pair_tile", least=1)
        check_range(self, "gumbel_temperature", above=True)
        check_choices(self)


class SimilarityAdapter(nn.Module):
    """VACSR's encoder and decoder, section 3.1 and figure 2: both MLPs of two layers, between them K Gaussians.

    s = D v * t, whose mean is the cosine, of order 1 where v * t of unit vectors is of order 1/D; h = relu(W s + b);
    (mean_k, log_var_k) = linear in h, (D,) each; alpha = softmax of K numbers, the same for all pairs;
    logit = u . relu(U z + c) + e.
    """

    def __init__(self, dim: int, hidden: int, components: int = 2):
        super().__init__()
        self.dim, self.components = dim, components
        self.encode = nn.Linear(dim, hidden)
        self.mean = nn.Linear(hidden, components * dim)
        self.log_var = nn.Linear(hidden, components * dim)
        self.mix = nn.Parameter(torch.zeros(components))
        self.decode = nn.Linear(dim, hidden)
        self.out = nn.Linear(hidden, 1)
        nn.init.zeros_(self.log_var.bias)

    def forward(self, v: Tensor, t: Tensor, normal: Tensor, gumbel: Tensor, temperature: float) -> Tensor:
        """Compute (3, n, m) of all pairs; v (n, D), t (m, D), noise (n, m, K D), or (n, m, D) for all k, and (n, m, K).

        Its rows: the logit of z = sum_k w_k (mean_k + sigma_k normal_k), 3.1, w = softmax of log alpha + gumbel; the
        divergence sum_k alpha_k KL(N_k || N(0, I)), (5), per dimension; the mean over D of sum_k w_k log_var_k.
        """
        with without_autocast(v.device):
            h = torch.relu(self.encode(self.dim * (v.unsqueeze(1) * t)))
            shape = *h.shape[:2], self.components, self.dim
            mean, log_var = self.mean(h).view(shape), self.log_var(h).view(shape)
            weight = ((F.log_softmax(self.mix, 0) + gumbel.to(h.dtype)) / temperature).softmax(-1)
            sigma = (log_var / 2).exp()
            drawn = torch.addcmul(mean, sigma, normal.to(h.dtype).unflatten(-1, (-1, self.dim)))
            z = (weight.unsqueeze(-2) @ drawn).squeeze(-2)
            logit = self.out(torch.relu(self.decode(z))).squeeze(-1)
            divergence = (mean.square() + sigma.square() - 1 - log_var).mean(-1) / 2 @ self.mix.softmax(0)
            return torch.stack([logit, divergence, (log_var.mean(-1) * weight).sum(-1)])

    def fold_into(self, network: PairNetwork) -> None:
        """Give a network the decoder at E[z] = sum_k alpha_k mean_k, and the mean over D of sum_k alpha_k log_var_k."""
        alpha, decode = self.mix.softmax(0), self.decode.weight

        def mixed(layer: nn.Linear) -> list[Tensor]:
            parts = (x.unflatten(0, (self.components, self.dim)) for x in (layer.weight, layer.bias))
            return [torch.einsum("k,k...->...", alpha, x) for x in parts]

        mean, log_var = mixed(self.mean), mixed(self.log_var)
        layers = {
            network.first: (self.dim * self.encode.weight, self.encode.bias),
            network.second: (decode @ mean[0], decode @ mean[1] + self.decode.bias),
            network.last: (self.out.weight, self.out.bias),
            network.spread: (log_var[0].mean(0, keepdim=True), log_var[1].mean(0, keepdim=True)),
        }
        with torch.no_grad():
            for layer, (weight, bias) in layers.items():
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)


class PairNetwork(nn.Module):
    """An adapter without sampling, for all pairs or paired rows, in a bounded workspace.

    h = relu(W s + b), logit = u relu(W' h + b') + c, log variance = r h + d, of the product s of the embeddings. The
    first layer of an image with all texts is one matrix product, W (v_i * t_j) = (W diag v_i) t_j.
    """

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.first, self.second = nn.Linear(dim, hidden), nn.Linear(hidden, hidden)
        self.last, self.spread = nn.Linear(hidden, 1), nn.Linear(hidden, 1)

    @property
    def linear(self) -> Tensor:
        """u W' W, (D,): the weight of each product in the logit where every relu passes its argument."""
        return (self.last.weight @ self.second.weight @ self.first.weight).squeeze(0)

    def forward(self, v: Tensor, t: Tensor) -> Tensor:
        """Return the logit of all pairs, (n, D), (m, D) -> (n, m)."""
        out = v.new_empty(len(v), len(t))
        columns = max(1, min(len(t), 1024))
        rows = max(1, self.pairs_at_once(v) // columns)
        first, second, last = self.first, self.second, self.last
        with without_autocast(v.device):
            for i in range(0, len(v), rows):
                own = v[i : i + rows]
                weight = (own.unsqueeze(1) * first.weight.to(v)).flatten(0, 1)  # one for each image, (rows H, D)
                for j in range(0, len(t), columns):
                    h = (weight @ t[j : j + columns].mT).view(len(own), len(first.weight), -1)
                    h = torch.relu_(h.add_(first.bias.to(v).unsqueeze(1)))
                    h = torch.relu_((second.weight.to(v) @ h).add_(second.bias.to(v).unsqueeze(1)))
                    out[i : i + rows, j : j + columns] = (last.weight.to(v) @ h).squeeze(1) + last.bias.to(v)
        return out

    def paired(self, v: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logit and log sigma^2 of each pair of rows, (N, D), (N, D) -> (N,), (N,)."""
        found, rows = [v.new_empty(0, 2)], self.pairs_at_once(v)
        layers = [(x.weight.to(v), x.bias.to(v)) for x in (self.first, self.second, self.last, self.spread)]
        with without_autocast(v.device):
            for own, other in zip(v.split(rows), t.split(rows)):
                h = torch.relu_(F.linear(own * other, *layers[0]))
                logit = F.linear(torch.relu_(F.linear(h, *layers[1])), *layers[2])
                found.append(torch.cat([logit, F.linear(h, *layers[3])], 1))
        logit, log_var = torch.cat(found).unbind(1)
        return logit, log_var

    @staticmethod
    def pairs_at_once(v: Tensor) -> int:
        """Return the hidden values that stay in a core's cache on CPU, or fill a device."""
        return 1 << 12 if v.device.type == "cpu" else 1 << 17


class PooledHead(nn.Module):
    """L2norm(GPO(W LN(x))), x the last tokens but [UNC], as PCME++'s mean (B.2); nothing reads the log variance."""

    def __init__(self, width: int, dim: int):
        super().__init__()
        self.norm, self.projection, self.pool = nn.LayerNorm(width), nn.Linear(width, dim), GeneralisedPooling()
        nn.init.xavier_uniform_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)

    def inherit(self, tower: Any) -> None:
        begin_as(self.norm, self.projection, tower)

    def forward(self, tokens: Tokens, z: Gaussian, ids: Tensor | None = None) -> Gaussian:
        features, valid = tokens.features()
        pooled = self.pool(project(layer_norm(self.norm, features), self.projection), valid)
        return Gaussian(F.normalize(pooled, dim=-1), z.log_var)


def extend(model: Any, config: VACSRConfig) -> None:
    """Add both heads, if any, and the adapter to a fresh model."""
    if config.pooled_heads:
        model.widen(config.head_dim)
        model.visual.head = PooledHead(model.visual.width, model.embed_dim)
        model.text.head = PooledHead(model.text.width, model.embed_dim)
    model.adapter = SimilarityAdapter(model.embed_dim, config.adapter_hidden, config.mixture_components)


class VACSRScore(Score):
    """The adapter's logit of a pair, whose sigmoid is the similarity, decoded from E[z] = sum_k alpha_k mean_k.

    shortlist: number of each query's nearest by `coarse` that the adapter scores; 0: all. The others keep the order of
    `coarse`, and there is no probability.
    """

    name, symmetric, supports_points, choices = "vacsr", False, True, ("shortlist",)

    def __init__(self, dim: int, hidden: int, shortlist: int = 0):
        super().__init__(*((None, None) if shortlist else (1.0, 0.0)))
        if shortlist < 0:
            raise ValueError(f"shortlist={shortlist}: give 1 or more, or 0 for all")
        self.shortlist = shortlist
        self.network = PairNetwork(dim, hidden)

    @classmethod
    def of(cls, model: Any) -> VACSRScore:
        adapter = model.adapter
        score = cls(adapter.dim, adapter.encode.out_features)
        adapter.fold_into(score.network)
        return score.to(adapter.mix.device).requires_grad_(False)

    def pairwise(self, queries: Gaussian, gallery: Gaussian) -> Tensor:
        p, q = check_pair(queries, gallery, ("images", "texts"))
        return self.network.to(p.mean.device)(p.mean, q.mean)

    def coarse(self, queries: Gaussian, gallery: Gaussian) -> Tensor:
        """Return the cheap score that chooses the shortlist: sum_d c_d v_d t_d, c the adapter's linear part."""
        images, texts = upcast(queries.mean), upcast(gallery.mean)
        with without_autocast(images.device):
            return images * self.network.to(images.device).linear.to(images) @ texts.mT

    def paired(self, images: Gaussian, texts: Gaussian) -> Tensor:
        """Return the score of each pair of rows, (N, D), (N, D) -> (N,)."""
        return self.network.to(images.mean.device).paired(upcast(images.mean), upcast(texts.mean))[0]

    def pair_uncertainty(self, images: Gaussian, texts: Gaussian) -> Tensor:
        """Return the latent sigma of each pair, (N,): the geometric mean over dimensions and, by alpha, components."""
        return (self.network.to(images.mean.device).paired(upcast(images.mean), upcast(texts.mean))[1] / 2).exp()

    def settings(self) -> dict[str, Any]:
        layer = self.network.first
        return {"dim": layer.in_features, "hidden": layer.out_features, "shortlist": self.shortlist}


class VACSRObjective(HeadsObjective):
    """alpha KL + beta [reconstruction + gamma (L_sigma of matches + L_sigma of hardest negatives)], (11).

    reconstruction: 1/2 (y - similarity)^2 of all pairs over the number of images, with the gradient of OpenCLIP's
    SigLIP (13). KL: mean over all pairs and dimensions. L_sigma: mean over images of the mean over their matches.
    """

    statistics = ("sigma",)
    frozen = ("logit_scale", "logit_bias")
    reads = ("mean",)
    config: VACSRConfig

    def __init__(self, model: Any, config: VACSRConfig, context: Context | None = None):
        super().__init__(model, config, context)
        for parameter in model.uncertainty_parameters():
            parameter.requires_grad_(False)
        self.shared = tuple(f"adapter.{name}" for name, _ in model.adapter.named_parameters())

    def notes(self, batch: int) -> tuple[str, ...]:
        alpha, dim = self.config.kl_weight / batch, self.model.embed_dim
        means = f"--kl-weight {self.config.kl_weight:.4g}: the paper's alpha is {alpha:.3g} if its terms are means over"
        own = f"{means} pairs and D, {alpha / dim:.3g} if its KL is a sum over D (B = {batch}, D = {dim})"
        return (*super().notes(batch), own)

    def prepare(self, batch: Batch, step: int) -> Batch:
        return super().prepare(batch, step) | {"pair_seed": self.context.draws.key(Stream.PAIR_NOISE, step)}

    def embed(self, batch: Batch) -> Reps:
        return self.means(batch) | {f"adapter.{name}": x * 1.0 for name, x in self.model.adapter.named_parameters()}

    def terms(self, reps: Reps, batch: Batch) -> Terms:
        config, seed = self.config, batch["pair_seed"]
        image, text = upcast(reps["image_mean"]), upcast(reps["text_mean"])
        weights = {name.removeprefix("adapter."): reps[name] for name in self.shared}
        normals = self.model.adapter.dim * (config.mixture_components if config.component_noise == "independent" else 1)
        place = self.context.draws.rows(len(image), image.device)

        def sample(images: tuple[Tensor, Tensor], texts: tuple[Tensor, Tensor]) -> Tensor:
            (v, rows), (t, columns) = images, texts
            noise = pair_noise(seed, rows, columns, normals, config.mixture_components)
            return functional_call(self.model.adapter, weights, (v, t, *noise, config.gumbel_temperature))

        parts: Terms = {}

        def pairs(numbers: Tensor, positive: Tensor) -> Tensor:
            logit, divergence, log_var = numbers
            found = pair_terms(logit, log_var, positive)
            found["kl"] = divergence.mean()
            with torch.no_grad():
                found["sigma"] = ((log_var / 2).exp() * positive).sum() / positive.sum()
            parts.update({name: value.detach() for name, value in found.items()})
            variances = found["sigma_matches"] + found["sigma_negatives"]
            reconstruction = config.recon_weight * (found["recon"] + config.sigma_weight * variances)
            return config.kl_weight * found["kl"] + reconstruction

        rows, adapter = ((image, place), (text, place)), tuple(weights.values())
        loss = tiled_loss_over_ranks(sample, *rows, pairs, adapter, self.matches(batch), tile=config.pair_tile)
        return {"loss": loss} | parts


def pair_terms(logit: Tensor, log_var: Tensor, positive: Tensor) -> Terms:
    """Return the reconstruction and L_sigma of matches and hardest negatives, of images with all texts, (n, m) each."""
    label = positive.to(logit.dtype)
    # Its gradient is that of the logit, A.1, so 1/2 (y - similarity)^2 has that of the sigmoid loss, (13).
    similarity = logit.detach().sigmoid() + (logit - logit.detach())
    matches = variance_loss(similarity - 1, log_var)
    hardest = logit.masked_fill(positive, -torch.inf).max(1)
    negative = matches.gather(1, hardest.indices.unsqueeze(1)).squeeze(1)
    return {
        "recon": (label - similarity).square().sum() / (2 * len(logit)),
        "sigma_matches": ((matches * label).sum(1) / label.sum(1)).mean(),
        "sigma_negatives": negative.where(hardest.values > -torch.inf, 0.0).mean(),
    }


def variance_loss(error: Tensor, log_var: Tensor) -> Tensor:
    """Return L_sigma = sg(error^2) / (2 s^2) + log s, s^2 = sigmoid(log sigma^2) = sigma^2 / (1 + sigma^2), (8).

    (8) prints sigma in the denominator, (9) and (10) follow from sigma^2. 1/s^2 = 1 + exp(-log_var).
    """
    return error.detach().square() * (1 + (-log_var).exp()) / 2 + F.logsigmoid(log_var) / 2


OF_PAIRS = "Every image and text is a point. Training learns the uncertainty of the similarity of each pair instead."
METHODS = {"vacsr": Method(VACSRConfig, VACSRObjective, VACSRScore, False, extend, variances=OF_PAIRS)}
