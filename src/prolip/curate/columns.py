"""The figures of a pair of an image and its caption. Needs no torch, so that help starts at once."""

from __future__ import annotations

#: Column -> what it is, for the help and the page.
MEANINGS = {
    "cosine": "cosine of the means (the CLIP score)",
    "score": "the model's own score of the pair",
    "match_probability": "probability that the caption is true of the image, by the model's scale and bias",
    "normalised_score": "a score - 1/2 (log mean exp of it over the batch's texts + over its images)",
    "own_first": "1 where the image scores highest with its own caption, of all in its batch",
    "image_uncertainty": "trace of the image, or what else the model's method calls its uncertainty",
    "text_uncertainty": "the same of the caption",
    "image_bits": "bits that the image says about which caption is meant, of models with units",
    "image_doubt": "share of the match probability that is no longer the model's, as the image is unlike its training",
    "image_ambiguity": "nats that an image leaves open about its topic, of models that keep general texts",
    "text_bits": "bits that the caption says about which image is meant",
    "inclusion": "inclusion test of the image in its caption: above 0 where the caption is the wider one",
    "text_tokens": "tokens of the caption",
    "width": "of the image, in pixels",
    "height": "of the image, in pixels",
}
#: Columns that need no model.
PLAIN = {"text_tokens", "width", "height"}
