"""Describes one quantizer in plain types, so that a config can hold it without importing torch."""

from dataclasses import dataclass

from rotexp.config.components import Pluggable

OFF_BITS = 16
ALLOWED_BITS = (2, 3, 4, 5, 6, 7, 8, OFF_BITS)


@dataclass(frozen=True)
class QuantSpec(Pluggable):
    """How a tensor is quantized along its last dimension: to integers, or to the format that `_target_` names.

    Attributes:
        bits: width of an integer, 2 to 8; 16 leaves the tensor as it is, unless `_target_` names a format.
        symmetric: whether integers are signed with zero point 0 (True) or unsigned with a zero point (False).
        group_size: consecutive elements of the last dimension that share a scale. None means all of them: per channel
            for a weight `(out, in)`, per token for activations `(batch, tokens, hidden)`, per head and token for
            keys and values `(batch, heads, tokens, head_dim)`.
        clip_ratio: factor in (0, 1] on every group's range; values beyond the shrunken range are clipped.
        clip_search: whether each group's ratio is searched for the least squared error (for weights; see
            `rotexp.quant.clip_search`).
    """

    bits: int = OFF_BITS
    symmetric: bool = True
    group_size: int | None = None
    clip_ratio: float = 1.0
    clip_search: bool = False

    @property
    def enabled(self) -> bool:
        """Whether the quantizer changes anything."""
        return self.target is not None or self.bits != OFF_BITS

    @property
    def clips(self) -> bool:
        """Whether clip ratios shrink the representable range."""
        return self.clip_search or self.clip_ratio < 1.0

    @property
    def label(self) -> str:
        """What tables call it: the bits of integers, or the name of the format's class."""
        return str(self.bits) if self.target is None else self.target.rpartition(".")[2]

    @property
    def setting(self) -> str:
        """The option that says what values become, and its value, for messages."""
        return f"bits={self.bits}" if self.target is None else f"_target_={self.target}"

    def validate(self, key: str) -> None:
        """Refuse values without a meaning.

        Args:
            key: the config key of this spec, used in messages.

        Raises:
            ValueError: naming the key, the value, the allowed values and the remedy.
        """
        if self.target is not None and (self.bits, self.symmetric) != (OFF_BITS, True):
            of_integers = f"bits={self.bits}" if self.bits != OFF_BITS else "symmetric=false"
            raise ValueError(f"{key}.{of_integers}: has no effect with {key}.{self.setting}; leave it out")
        if self.bits not in ALLOWED_BITS:
            raise ValueError(f"{key}.bits={self.bits} is not one of {ALLOWED_BITS}; set {OFF_BITS} to switch it off")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"{key}.group_size={self.group_size} is below 1; set null for the whole last dimension")
        if not 0.0 < self.clip_ratio <= 1.0:
            raise ValueError(f"{key}.clip_ratio={self.clip_ratio} is not in (0, 1]; set 1.0 to clip nothing")
        if self.clip_search and self.clip_ratio != 1.0:
            raise ValueError(
                f"{key}.clip_ratio={self.clip_ratio} has no effect with {key}.clip_search=true, which allows only 1.0; "
                "set one of the two"
            )

    def num_groups(self, width: int) -> int:
        """Count the groups in a last dimension.

        Args:
            width: size of the last dimension.

        Raises:
            ValueError: if `group_size` does not divide `width`.
        """
        if self.group_size is None:
            return 1
        if width % self.group_size:
            nearest = " or ".join(str(divisor) for divisor in nearest_divisors(width, near=self.group_size))
            raise ValueError(f"group_size={self.group_size} does not divide the width {width}; set {nearest}, or null")
        return width // self.group_size


def nearest_divisors(number: int, *, near: int) -> list[int]:
    """List the largest divisor of `number` up to `near` and the smallest one beyond it, where there is one."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    below = [divisor for divisor in divisors if divisor <= near]
    above = [divisor for divisor in divisors if divisor > near]
    return below[-1:] + above[:1]
