"""Signatures of the factories; ``make recipe`` writes this file."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Generic, Literal, Protocol, TypeVar, overload

from horovod_fftcomp import Recover
from horovod_fftcomp.schedules import Schedule

_Model = TypeVar("_Model")
_Compressor = TypeVar("_Compressor")
_Model_contra = TypeVar("_Model_contra", contravariant=True)
_Compressor_co = TypeVar("_Compressor_co", covariant=True)

class Compression(Generic[_Model, _Compressor]):
    """Factories of compressors, such as ``Compression.fft(model, density=0.15)``."""

    @staticmethod
    def none(
        model: _Model = ...,
        *,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: all values in float32.

        Source: Horovod's own.
        """

    @staticmethod
    def fp16(
        model: _Model = ...,
        *,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: all values in float16, saturating.

        Source: Horovod's own.
        """

    @staticmethod
    def bf16(
        model: _Model = ...,
        *,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: all values in bfloat16, summed in float32.

        Source: Kalamkar et al. 2019.

        Parameters
        ----------
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        """

    @staticmethod
    def topk(
        model: _Model = ...,
        *,
        density: float = 0.038,
        bits: int = 4,
        error_feedback: bool = True,
        scope: Literal["tensor", "bucket", "model"] = "tensor",
        decay: float = 1.0,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: the largest values, in few-bit floats.

        Source: Aji and Heafield 2017.

        Parameters
        ----------
        density
            Share of the values or coefficients that are sent (k / n), above 0 and at most 1.
        bits
            Bits per sent value: 2 to 16, or 32 for float32.
        error_feedback
            Whether the unsent part of a gradient (the residual) is added to the next one.
        scope
            Elements that share one k: those of a "tensor", of a "bucket" or of the whole
            "model".
        decay
            Decay of the residual per step, above 0 and at most 1.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        second_density
            Density of the second compression of a sharded exchange; None: by ``density``.
        second_bits
            Bits per value in the second compression of a sharded exchange; None: as in the
            first.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def fft(
        model: _Model = ...,
        *,
        density: float = 0.33,
        bits: int = 4,
        block: int = 64,
        error_feedback: bool = True,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: the largest coefficients of a block FFT, in few-bit floats.

        Source: Wang et al., HPDC 2020.

        Parameters
        ----------
        density
            Share of the values or coefficients that are sent (k / n), above 0 and at most 1.
        bits
            Bits per sent value: 2 to 16, or 32 for float32.
        block
            Block length of the transform in elements: a power of two from 64 to 4096.
        error_feedback
            Whether the unsent part of a gradient (the residual) is added to the next one.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        second_density
            Density of the second compression of a sharded exchange; None: by ``density``.
        second_bits
            Bits per value in the second compression of a sharded exchange; None: as in the
            first.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def dct(
        model: _Model = ...,
        *,
        density: float = 0.3,
        bits: int = 4,
        block: int = 64,
        error_feedback: bool = True,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: the largest coefficients of a block DCT, in few-bit floats.

        Source: as fft.

        Parameters
        ----------
        density
            Share of the values or coefficients that are sent (k / n), above 0 and at most 1.
        bits
            Bits per sent value: 2 to 16, or 32 for float32.
        block
            Block length of the transform in elements: a power of two from 64 to 4096.
        error_feedback
            Whether the unsent part of a gradient (the residual) is added to the next one.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        second_density
            Density of the second compression of a sharded exchange; None: by ``density``.
        second_bits
            Bits per value in the second compression of a sharded exchange; None: as in the
            first.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def auto(
        model: _Model = ...,
        *,
        ratio: float = 50.0,
        every: int = 2000,
        error_feedback: bool = True,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: largest coefficients; transform, bits and density by trial.

        Source: this package.

        Parameters
        ----------
        ratio
            Compression ratio of all tensors, dense bytes over sent bytes: 1 to 10,000.
        every
            Steps from one trial of all transforms, bit widths and densities to the next.
        error_feedback
            Whether the unsent part of a gradient (the residual) is added to the next one.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        second_density
            Density of the second compression of a sharded exchange; None: by ``density``.
        second_bits
            Bits per value in the second compression of a sharded exchange; None: as in the
            first.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def demo(
        model: _Model = ...,
        *,
        density: float = 0.03,
        bits: int = 4,
        block: int = 64,
        decay: float = 0.999,
        sign: bool = False,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: DeMo: top DCT coefficients of the momentum, subtracted once sent.

        Source: Peng et al. 2024.

        Parameters
        ----------
        density
            Share of the values or coefficients that are sent (k / n), above 0 and at most 1.
        bits
            Bits per sent value: 2 to 16, or 32 for float32.
        block
            Block length of the transform in elements: a power of two from 64 to 4096.
        decay
            Decay of the momentum per step, above 0 and at most 1.
        sign
            Whether the optimizer gets the sign of the mean instead of the mean.
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        second_density
            Density of the second compression of a sharded exchange; None: by ``density``.
        second_bits
            Bits per value in the second compression of a sharded exchange; None: as in the
            first.
        """

    @staticmethod
    def hard_threshold(
        model: _Model = ...,
        *,
        density: float = 0.001,
        threshold: float | None = None,
        calibrate_steps: int = 100,
        bits: int = 32,
        error_feedback: bool = True,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: all values above a fixed threshold.

        Source: Sahu et al., NeurIPS 2021.

        Parameters
        ----------
        density
            Density of the top-k that calibrates the threshold, above 0 and at most 1.
        threshold
            Smallest magnitude that is sent, in units of a gradient; None: calibrated by top-k.
        calibrate_steps
            Steps of top-k that calibrate the threshold, if none is given.
        bits
            Bits per sent value: 2 to 16, or 32 for float32.
        error_feedback
            Whether the unsent part of a gradient (the residual) is added to the next one.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        second_density
            Density of the second compression of a sharded exchange; None: by ``density``.
        second_bits
            Bits per value in the second compression of a sharded exchange; None: as in the
            first.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def random_block(
        model: _Model = ...,
        *,
        density: float = 0.01,
        error_feedback: bool = True,
        unbiased: bool = False,
        exchange: Literal["reduce", "gather"] = "reduce",
        scope: Literal["tensor", "bucket", "model"] = "tensor",
        seed: int = 0,
        beta: float = 0.1,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: one block of consecutive values at a random offset, float32.

        Source: Vogels et al. 2019.

        Parameters
        ----------
        density
            Share of the values or coefficients that are sent (k / n), above 0 and at most 1.
        error_feedback
            Whether the unsent part of a gradient (the residual) is added to the next one.
        unbiased
            Whether sent values are divided by ``density``; needs ``error_feedback=False``.
        exchange
            "reduce": all ranks send the same positions; "gather": each rank sends its own.
        scope
            Elements that share one k: those of a "tensor", of a "bucket" or of the whole
            "model".
        seed
            Seed of the random numbers: 0 to 2**64 - 1, the same on all ranks.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def scalecom(
        model: _Model = ...,
        *,
        density: float = 0.01,
        beta: float = 0.1,
        selector: Literal["chunk", "exact"] = "chunk",
        bits: int = 32,
        error_feedback: bool = True,
        scope: Literal["tensor", "bucket", "model"] = "tensor",
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: CLT-k: values at common positions, selected by ranks in rotation.

        Source: Chen et al., NeurIPS 2020.

        Parameters
        ----------
        density
            Share of the values or coefficients that are sent (k / n), above 0 and at most 1.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        selector
            "chunk": the largest of every 1 / density elements; "exact": the top-k of a tensor.
        bits
            Bits per sent value: 16 for float16 or 32 for float32.
        error_feedback
            Whether the unsent part of a gradient (the residual) is added to the next one.
        scope
            Elements that share one k: those of a "tensor", of a "bucket" or of the whole
            "model".
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def arctopk(
        model: _Model = ...,
        *,
        density: float = 0.02,
        block: int = 128,
        bits: int = 16,
        error_feedback: bool = True,
        scope: Literal["tensor", "bucket", "model"] = "bucket",
        seed: int = 0,
        beta: float = 0.1,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: rows that a sketch of the sum finds largest.

        Source: Chen et al. 2025.

        Parameters
        ----------
        density
            Share of the values or coefficients that are sent (k / n), above 0 and at most 1.
        block
            Elements of a row, which are sent together: a power of two from 8 to 4096.
        bits
            Bits per sent value and sum of the sketch: 16 for float16 or 32 for float32.
        error_feedback
            Whether the unsent part of a gradient (the residual) is added to the next one.
        scope
            Elements that share one k: those of a "tensor", of a "bucket" or of the whole
            "model".
        seed
            Seed of the random numbers: 0 to 2**64 - 1, the same on all ranks.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def random_k(
        model: _Model = ...,
        *,
        density: float = 0.01,
        error_feedback: bool = True,
        unbiased: bool = False,
        exchange: Literal["reduce", "gather"] = "reduce",
        scope: Literal["tensor", "bucket", "model"] = "tensor",
        seed: int = 0,
        beta: float = 0.1,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: values at random positions, float32.

        Source: Stich et al. 2018.

        Parameters
        ----------
        density
            Share of the values or coefficients that are sent (k / n), above 0 and at most 1.
        error_feedback
            Whether the unsent part of a gradient (the residual) is added to the next one.
        unbiased
            Whether sent values are divided by ``density``; needs ``error_feedback=False``.
        exchange
            "reduce": all ranks send the same positions; "gather": each rank sends its own.
        scope
            Elements that share one k: those of a "tensor", of a "bucket" or of the whole
            "model".
        seed
            Seed of the random numbers: 0 to 2**64 - 1, the same on all ranks.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def dgc(
        model: _Model = ...,
        *,
        density: float = 0.001,
        momentum: float = 0.9,
        nesterov: bool = False,
        masking: bool = True,
        max_norm: float | None = None,
        bits: int = 32,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: the largest accumulated velocities; optimizer without momentum.

        Source: Lin et al., ICLR 2018.

        Parameters
        ----------
        density
            Share of the values or coefficients that are sent (k / n), above 0 and at most 1.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        masking
            Whether the velocity of a sent element is reset to 0.
        max_norm
            Clip each tensor's gradient to a norm of max_norm / sqrt(world size); None: no
            clipping.
        bits
            Bits per sent value: 2 to 16, or 32 for float32.
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        second_density
            Density of the second compression of a sharded exchange; None: by ``density``.
        second_bits
            Bits per value in the second compression of a sharded exchange; None: as in the
            first.
        """

    @staticmethod
    def powersgd(
        model: _Model = ...,
        *,
        rank: int = 4,
        error_feedback: bool = True,
        seed: int = 0,
        beta: float = 1.0,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: the two factors of a low-rank approximation, float32.

        Source: Vogels et al., NeurIPS 2019.

        Parameters
        ----------
        rank
            Rank of the approximation: 1 to 1024.
        error_feedback
            Whether the unsent part of a gradient (the residual) is added to the next one.
        seed
            Seed of the random numbers: 0 to 2**64 - 1, the same on all ranks.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def gtopk(
        model: _Model = ...,
        *,
        density: float = 0.01,
        error_feedback: bool = True,
        beta: float = 1.0,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: global top-k, by merging all ranks' top-k lists, float32.

        Source: Shi et al., ICDCS 2019.

        Parameters
        ----------
        density
            Share of the values or coefficients that are sent (k / n), above 0 and at most 1.
        error_feedback
            Whether the unsent part of a gradient (the residual) is added to the next one.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def sparcml(
        model: _Model = ...,
        *,
        density: float = 0.01,
        error_feedback: bool = True,
        beta: float = 1.0,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: the largest values, float32, as sparse sums merged pairwise.

        Source: Renggli et al., SC 2019.

        Parameters
        ----------
        density
            Share of the values or coefficients that are sent (k / n), above 0 and at most 1.
        error_feedback
            Whether the unsent part of a gradient (the residual) is added to the next one.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def sketchsgd(
        model: _Model = ...,
        *,
        density: float = 0.001,
        momentum: float = 0.9,
        nesterov: bool = False,
        masking: bool = True,
        rows: int = 5,
        columns: int = 10,
        candidates: int = 4,
        seed: int = 0,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: values of count-sketch heavy hitters; optimizer without momentum.

        Source: Ivkin et al., NeurIPS 2019.

        Parameters
        ----------
        density
            Share of the values or coefficients that are sent (k / n), above 0 and at most 1.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        masking
            Whether the velocity of a sent element is reset to 0.
        rows
            Rows of the sketch: 1, 3, 5, 7 or 9.
        columns
            Columns of the sketch per sent element: 1 to 64.
        candidates
            Elements summed exactly per sent element: 1 to 64.
        seed
            Seed of the random numbers: 0 to 2**64 - 1, the same on all ranks.
        """

    @staticmethod
    def strom(
        model: _Model = ...,
        *,
        threshold: float = 0.001,
        quanta: int = 1,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: plus or minus the threshold, for each value that reaches it.

        Source: Strom, Interspeech 2015.

        Parameters
        ----------
        threshold
            Magnitude sent for each value that reaches it, in units of a gradient.
        quanta
            Largest multiple of the threshold sent for one value in a step: 1 to 32,768.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        second_density
            Density of the second compression of a sharded exchange; None: by ``density``.
        second_bits
            Bits per value in the second compression of a sharded exchange; None: as in the
            first.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def adacomp(
        model: _Model = ...,
        *,
        bin: int | None = None,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: AdaComp: signs of each bin's near-maxima, one scale.

        Source: Chen et al., AAAI 2018.

        Parameters
        ----------
        bin
            Length of a bin in elements; None: 50 for convolutions, 500 for other tensors.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        second_density
            Density of the second compression of a sharded exchange; None: by ``density``.
        second_bits
            Bits per value in the second compression of a sharded exchange; None: as in the
            first.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def wangni(
        model: _Model = ...,
        *,
        density: float = 0.01,
        seed: int = 0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: values sampled in proportion to magnitude, unbiased, float32.

        Source: Wangni et al., NeurIPS 2018.

        Parameters
        ----------
        density
            Expected share of the values that are sent, above 0 and at most 1.
        seed
            Seed of the random numbers: 0 to 2**64 - 1, the same on all ranks.
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        """

    @staticmethod
    def qsgd(
        model: _Model = ...,
        *,
        levels: int = 7,
        bucket: int = 1024,
        norm: Literal["max", "l2"] = "max",
        error_feedback: bool = False,
        seed: int = 0,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: all values, stochastically rounded to a few levels.

        Source: Alistarh et al. 2017.

        Parameters
        ----------
        levels
            Quantization levels of a magnitude, zero not counted: 1 to 2047.
        bucket
            Elements that share a norm: a power of two from 64 to 4096.
        norm
            Norm that the levels divide evenly: "max", the largest magnitude, or "l2".
        error_feedback
            Whether the unsent part of a gradient (the residual) is added to the next one.
        seed
            Seed of the random numbers: 0 to 2**64 - 1, the same on all ranks.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def dither(
        model: _Model = ...,
        *,
        ratio: int = 20,
        bucket: int = 256,
        seed: int = 0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: all values, rounded with a spaced dither, entropy-coded.

        Source: Abdi and Fekri 2019; Suresh et al., ICML 2022.

        Parameters
        ----------
        ratio
            How many times fewer bytes than float32: 16, 20, 30, 40, 60, 80, 100 or 160.
        bucket
            Elements that share a scale: 128, 256, 512 or 1024.
        seed
            Seed of the random numbers: 0 to 2**64 - 1, the same on all ranks.
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def terngrad(
        model: _Model = ...,
        *,
        clip: float = 2.5,
        packing: Literal["base3", "bits"] = "base3",
        seed: int = 0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: all values, stochastically rounded to -1, 0, 1 times a scale.

        Source: Wen et al. 2017.

        Parameters
        ----------
        clip
            Values are clipped to this many standard deviations of the tensor; 0: no clipping.
        packing
            "base3": 1.6 bits per value; "bits": 2 bits per value, faster to decode.
        seed
            Seed of the random numbers: 0 to 2**64 - 1, the same on all ranks.
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        """

    @staticmethod
    def onebit(
        model: _Model = ...,
        *,
        group: Literal["tensor", "column"] = "tensor",
        error_feedback: bool = True,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: 1-bit SGD: all signs, one mean for each sign.

        Source: Seide et al. 2014.

        Parameters
        ----------
        group
            Elements that share the two means: those of a "tensor" or of a "column".
        error_feedback
            Whether the unsent part of a gradient (the residual) is added to the next one.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def efsignsgd(
        model: _Model = ...,
        *,
        error_feedback: bool = True,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: all signs, scaled by the mean magnitude.

        Source: Karimireddy et al. 2019.

        Parameters
        ----------
        error_feedback
            Whether the unsent part of a gradient (the residual) is added to the next one.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def signsgd(
        model: _Model = ...,
        *,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: all signs; majority vote over the ranks.

        Source: Bernstein et al. 2019.

        Parameters
        ----------
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        """

    @staticmethod
    def signum(
        model: _Model = ...,
        *,
        decay: float = 0.9,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: all signs of the momentum; majority vote over the ranks.

        Source: Bernstein et al. 2018.

        Parameters
        ----------
        decay
            Decay of the momentum per step, above 0 and at most 1.
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        """

    @staticmethod
    def natural(
        model: _Model = ...,
        *,
        error_feedback: bool = False,
        seed: int = 0,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: all values, stochastically rounded to powers of two.

        Source: Horvath et al. 2019.

        Parameters
        ----------
        error_feedback
            Whether the unsent part of a gradient (the residual) is added to the next one.
        seed
            Seed of the random numbers: 0 to 2**64 - 1, the same on all ranks.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def dorefa(
        model: _Model = ...,
        *,
        bits: int = 4,
        error_feedback: bool = False,
        seed: int = 0,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        process_set: Any = None,
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor:
        """Return a compressor: all values, stochastically rounded to a uniform grid.

        Source: Zhou et al. 2016.

        Parameters
        ----------
        bits
            Bits per sent value: 1 to 12.
        error_feedback
            Whether the unsent part of a gradient (the residual) is added to the next one.
        seed
            Seed of the random numbers: 0 to 2**64 - 1, the same on all ranks.
        beta
            Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
        exchange
            "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not
            grow with the number of ranks; "auto": by bytes.
        momentum
            Momentum applied before compression, from 0 to below 1. The optimizer must have
            none; with ``dense_every`` it is Adam or AdamW of this package with this as its
            first beta.
        nesterov
            Whether the momentum is Nesterov's.
        """

    @staticmethod
    def parse(
        text: str,
        model: _Model = ...,
        **options: Any,
    ) -> _Compressor:
        """Return a compressor, written as ``"fft:density=0.1"``."""

class Compress(Protocol[_Model_contra, _Compressor_co]):
    """Function such as ``compress(model, "fft", density=0.15)``, by the name of a recipe.

    The last signature is for a name in a variable and for options in text, "fft:density=0.15": give
    all options of the recipe there, or as ``**options``, a dict.
    """

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["none"],
        *,
        replicate: Any = None,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: all values in float32."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["fp16"],
        *,
        replicate: Any = None,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: all values in float16, saturating."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["bf16"],
        *,
        replicate: Any = None,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: all values in bfloat16, summed in float32."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["topk"],
        *,
        replicate: Any = None,
        density: float = 0.038,
        bits: int = 4,
        error_feedback: bool = True,
        scope: Literal["tensor", "bucket", "model"] = "tensor",
        decay: float = 1.0,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: the largest values, in few-bit floats."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["fft"],
        *,
        replicate: Any = None,
        density: float = 0.33,
        bits: int = 4,
        block: int = 64,
        error_feedback: bool = True,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: the largest coefficients of a block FFT, in few-bit floats."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["dct"],
        *,
        replicate: Any = None,
        density: float = 0.3,
        bits: int = 4,
        block: int = 64,
        error_feedback: bool = True,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: the largest coefficients of a block DCT, in few-bit floats."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["auto"],
        *,
        replicate: Any = None,
        ratio: float = 50.0,
        every: int = 2000,
        error_feedback: bool = True,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: largest coefficients; transform, bits and density by trial."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["demo"],
        *,
        replicate: Any = None,
        density: float = 0.03,
        bits: int = 4,
        block: int = 64,
        decay: float = 0.999,
        sign: bool = False,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: DeMo: top DCT coefficients of the momentum, subtracted once sent."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["hard_threshold"],
        *,
        replicate: Any = None,
        density: float = 0.001,
        threshold: float | None = None,
        calibrate_steps: int = 100,
        bits: int = 32,
        error_feedback: bool = True,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: all values above a fixed threshold."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["random_block"],
        *,
        replicate: Any = None,
        density: float = 0.01,
        error_feedback: bool = True,
        unbiased: bool = False,
        exchange: Literal["reduce", "gather"] = "reduce",
        scope: Literal["tensor", "bucket", "model"] = "tensor",
        seed: int = 0,
        beta: float = 0.1,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: one block of consecutive values at a random offset, float32."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["scalecom"],
        *,
        replicate: Any = None,
        density: float = 0.01,
        beta: float = 0.1,
        selector: Literal["chunk", "exact"] = "chunk",
        bits: int = 32,
        error_feedback: bool = True,
        scope: Literal["tensor", "bucket", "model"] = "tensor",
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: CLT-k: values at common positions, selected by ranks in rotation."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["arctopk"],
        *,
        replicate: Any = None,
        density: float = 0.02,
        block: int = 128,
        bits: int = 16,
        error_feedback: bool = True,
        scope: Literal["tensor", "bucket", "model"] = "bucket",
        seed: int = 0,
        beta: float = 0.1,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: rows that a sketch of the sum finds largest."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["random_k"],
        *,
        replicate: Any = None,
        density: float = 0.01,
        error_feedback: bool = True,
        unbiased: bool = False,
        exchange: Literal["reduce", "gather"] = "reduce",
        scope: Literal["tensor", "bucket", "model"] = "tensor",
        seed: int = 0,
        beta: float = 0.1,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: values at random positions, float32."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["dgc"],
        *,
        replicate: Any = None,
        density: float = 0.001,
        momentum: float = 0.9,
        nesterov: bool = False,
        masking: bool = True,
        max_norm: float | None = None,
        bits: int = 32,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: the largest accumulated velocities; optimizer without momentum."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["powersgd"],
        *,
        replicate: Any = None,
        rank: int = 4,
        error_feedback: bool = True,
        seed: int = 0,
        beta: float = 1.0,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: the two factors of a low-rank approximation, float32."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["gtopk"],
        *,
        replicate: Any = None,
        density: float = 0.01,
        error_feedback: bool = True,
        beta: float = 1.0,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: global top-k, by merging all ranks' top-k lists, float32."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["sparcml"],
        *,
        replicate: Any = None,
        density: float = 0.01,
        error_feedback: bool = True,
        beta: float = 1.0,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: the largest values, float32, as sparse sums merged pairwise."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["sketchsgd"],
        *,
        replicate: Any = None,
        density: float = 0.001,
        momentum: float = 0.9,
        nesterov: bool = False,
        masking: bool = True,
        rows: int = 5,
        columns: int = 10,
        candidates: int = 4,
        seed: int = 0,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: values of count-sketch heavy hitters; optimizer without momentum."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["strom"],
        *,
        replicate: Any = None,
        threshold: float = 0.001,
        quanta: int = 1,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: plus or minus the threshold, for each value that reaches it."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["adacomp"],
        *,
        replicate: Any = None,
        bin: int | None = None,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: AdaComp: signs of each bin's near-maxima, one scale."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["wangni"],
        *,
        replicate: Any = None,
        density: float = 0.01,
        seed: int = 0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: values sampled in proportion to magnitude, unbiased, float32."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["qsgd"],
        *,
        replicate: Any = None,
        levels: int = 7,
        bucket: int = 1024,
        norm: Literal["max", "l2"] = "max",
        error_feedback: bool = False,
        seed: int = 0,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: all values, stochastically rounded to a few levels."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["dither"] = "dither",
        *,
        replicate: Any = None,
        ratio: int = 20,
        bucket: int = 256,
        seed: int = 0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: all values, rounded with a spaced dither, entropy-coded."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["terngrad"],
        *,
        replicate: Any = None,
        clip: float = 2.5,
        packing: Literal["base3", "bits"] = "base3",
        seed: int = 0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: all values, stochastically rounded to -1, 0, 1 times a scale."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["onebit"],
        *,
        replicate: Any = None,
        group: Literal["tensor", "column"] = "tensor",
        error_feedback: bool = True,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: 1-bit SGD: all signs, one mean for each sign."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["efsignsgd"],
        *,
        replicate: Any = None,
        error_feedback: bool = True,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: all signs, scaled by the mean magnitude."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["signsgd"],
        *,
        replicate: Any = None,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: all signs; majority vote over the ranks."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["signum"],
        *,
        replicate: Any = None,
        decay: float = 0.9,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: all signs of the momentum; majority vote over the ranks."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["natural"],
        *,
        replicate: Any = None,
        error_feedback: bool = False,
        seed: int = 0,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: all values, stochastically rounded to powers of two."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: Literal["dorefa"],
        *,
        replicate: Any = None,
        bits: int = 4,
        error_feedback: bool = False,
        seed: int = 0,
        beta: float = 1.0,
        exchange: Literal["auto", "gather", "sharded"] = "auto",
        momentum: float = 0.0,
        nesterov: bool = False,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: all values, stochastically rounded to a uniform grid."""

    @overload
    def __call__(
        self,
        model: _Model_contra,
        recipe: str,
        *,
        replicate: Any = None,
        warmup_steps: int | None = None,
        density_schedule: Schedule | Mapping[int, float] | float | None = None,
        dense_every: int = 0,
        dense_by: str = "bf16",
        ranks_per_node: int | Literal["auto"] = 1,
        min_numel: int = 1024,
        bucket_nbytes: int = 25000000,
        rules: Sequence[tuple[Any, Any]] = (),
        grad_scaler: Any = None,
        replica_check: Literal["warn", "broadcast", "off"] = "warn",
        recover: Recover | None = None,
        record: str | PathLike[str] | None = None,
        record_every: int = 50,
        live_view: str | PathLike[str] | None = None,
        scalars: Any = None,
        live_every: int = 50,
        timeout_s: float = 600.0,
        on_timeout: Literal["raise", "warn"] = "raise",
    ) -> _Compressor_co:
        """Compress: ``recipe`` is a name, or text with options."""
