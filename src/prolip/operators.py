"""What a Gaussian refuses: it is a tuple of two tensors, no sequence to add and repeat, and no tensor either.

Left alone `z * 2`, `z + w`, `z == w` and `z[:2]` would act on the tuple without a word. None has one meaning for a
Gaussian (twice the random variable has 4 sigma^2, twice the density is no density), so each raises and says what to
write. Tuples have no other operators. All that takes a tuple apart stays: unpacking, z[0], len(z), pickle, tree_map,
DDP, torch.compile.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from torch import Tensor

COMPUTE = ("compute with its tensors z.mean and z.log_var (log sigma^2), join rows with"
           " prolip.gaussian.concatenate([z, w]), average them with prolip.gaussian.mixture(z)")
COMPARE = "compare tensors, torch.equal(z.mean, w.mean), or Gaussians by a measure, prolip.measures.csd(z, w)"
ROWS = "a Gaussian is indexed by 0 (mean) and 1 (log_var) alone: take rows with z.select(rows)"
#: What OpenCLIP's users write first: features / features.norm(...), and features @ features.T.
ATTRIBUTES = {
    "norm": "means have unit length already, leave `z / z.norm()` out",
    "T": "match images with texts by prolip.measures.pairwise_csd_similarity(image, text)",
}
Class = TypeVar("Class", bound=type)


def refuse(what: str, remedy: str) -> Callable[..., NoReturn]:
    """A method that raises TypeError."""
    def method(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"a Gaussian has no {what}: {remedy}")

    return method


def comparison(name: str, symbol: str) -> Callable[[Any, Any], Any]:
    """A tuple's comparison, refused with what may be meant as a Gaussian: `z == None` stays False."""
    of_tuples, method = getattr(tuple, name), refuse(f"operator {symbol}", COMPARE)
    return lambda self, other: method(self) if isinstance(other, (tuple, Tensor)) else of_tuples(self, other)


def item(self: Any, index: Any) -> Any:
    """z[0] is the mean and z[1] the log variance, as in unpacking. TypeError and IndexError for rows."""
    if type(index) is not int:
        raise TypeError(ROWS)
    if not -2 <= index < 2:
        raise IndexError(f"z[{index}]: {ROWS}")
    return self.log_var if index % 2 else self.mean  # torch.compile traces this, and not tuple's own in every version


def missing(self: Any, name: str) -> NoReturn:
    """AttributeError, with a remedy for what tensors have."""
    remedy = ATTRIBUTES.get(name, f"{COMPUTE}, move it with z.to(...)")
    of_tensors = not name.startswith("_") and hasattr(Tensor, name)
    raise AttributeError(f"a Gaussian has no {name!r}" + (f": {remedy}" if of_tensors else ""))


def without_tuple_operators(cls: Class) -> Class:
    """Class decorator. (A NamedTuple keeps `tuple` as its only base, or tree_map would take it for a leaf.)"""
    methods: dict[str, Any] = {f"__{side}{name}__": refuse(f"operator {sign}", COMPUTE)
                               for name, sign in (("add", "+"), ("mul", "*")) for side in ("", "r")}  # fmt: skip
    methods |= {f"__{name}__": comparison(f"__{name}__", sign) for name, sign in (
        ("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))}  # fmt: skip
    methods |= {"__contains__": refuse("operator in", COMPARE), "__getitem__": item, "__getattr__": missing}
    # Or NumPy would stack both tensors, in np.asarray(z) and in array * z.
    methods |= {"__array__": refuse("one array", "take z.mean.numpy() and z.log_var.numpy()"), "__array_ufunc__": None}
    for name, method in methods.items():
        setattr(cls, name, method)
    return cls
