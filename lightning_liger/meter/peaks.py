"""What a device computes at most: dense matrix products in TFLOP/s, from data sheets or measured.

Data sheets of NVIDIA print figures for 2:4 sparse weights, some of them without saying so; all figures here are dense,
with fp32 accumulation. ``tf32`` is what fp32 products use once ``torch.set_float32_matmul_precision("high")`` is set.
"""

from __future__ import annotations

import functools
import re
import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peak:
    """TFLOP/s of dense products; None where the hardware has no such units."""

    bf16: float
    fp16: float
    fp8: float | None
    tf32: float | None
    fp32: float

    def of(self, dtype: torch.dtype) -> float | None:
        """For products of ``dtype``; fp32 ones as PyTorch computes them now."""
        if dtype == torch.bfloat16:
            return self.bf16
        if dtype == torch.float16:
            return self.fp16
        if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            return self.fp8
        if dtype == torch.float32:
            return self.tf32 if self.tf32 and torch.get_float32_matmul_precision() != "highest" else self.fp32
        return None


def _peak(half: float, fp8: float | None, tf32: float | None, fp32: float) -> Peak:
    return Peak(half, half, fp8, tf32, fp32)


# Whole device names, lower case, without the maker: variants that are not listed (laptops, A10G, 4090 D, H800, slices)
# have other clocks and are measured.
PEAKS: dict[str, Peak] = {
    # NVIDIA A100 data sheet (2021): 312 bf16 without sparsity; the same for SXM and PCIe
    r"a100.*": _peak(312.0, None, 156.0, 19.5),
    # NVIDIA A10 data sheet (2021): 125, 250 with sparsity
    r"a10": _peak(125.0, None, 62.5, 31.2),
    # NVIDIA L4 data sheet (2023): 242 bf16, 485 fp8 and 120 tf32 are "with sparsity"; halved
    r"l4": _peak(121.0, 242.5, 60.0, 30.3),
    # NVIDIA L40S data sheet (2023): 362.05 | 733, 733 | 1,466, 183 | 366
    r"l40s": _peak(362.05, 733.0, 183.0, 91.6),
    # NVIDIA Ada GPU architecture white paper 2.1, appendix A: with fp32 accumulation, without sparsity
    r"rtx 4090": _peak(165.2, 330.3, 82.6, 82.6),
    # NVIDIA RTX Blackwell GPU architecture white paper, appendix A: with fp32 accumulation, without sparsity
    r"rtx 5090": _peak(209.5, 419.0, 104.8, 104.8),
    # NVIDIA H100 white paper 1.04, table 2; the data sheet's 1,979 is sparse. HBM2e boards are "H100 PCIe"
    r"h100 pcie": _peak(756.0, 1513.0, 378.0, 51.2),
    # NVIDIA H100 data sheet (2024), column NVL, one card: 1,671 bf16, 3,341 fp8, 835 tf32 are sparse; halved
    r"h100 nvl": _peak(835.5, 1670.5, 417.5, 60.0),
    # NVIDIA H100 white paper 1.04, table 2, SXM5. The driver calls it "NVIDIA H100 80GB HBM3"
    r"h100( \d+gb hbm3| sxm.*)?": _peak(989.4, 1978.9, 494.7, 66.9),
    # NVIDIA H200 data sheet (2024): SXM 1,979 and NVL 1,671 bf16 are sparse; halved
    r"h200 nvl": _peak(835.5, 1670.5, 417.5, 60.0),
    r"h200( sxm.*)?": _peak(989.4, 1978.9, 494.7, 66.9),
    # NVIDIA Blackwell data sheet (2025), per GPU of HGX B200: 4.5 PFLOP/s bf16, 9 fp8, 2.2 tf32 are sparse; halved
    r"b200.*": _peak(2250.0, 4500.0, 1100.0, 75.0),
    # The same, GB200 NVL72: 5 PFLOP/s bf16, 10 fp8, 2.5 tf32 sparse; halved
    r"gb200.*": _peak(2500.0, 5000.0, 1250.0, 80.0),
    # NVIDIA Blackwell Ultra data sheet (2025), an eighth of HGX B300: 36 PFLOP/s bf16, 72 fp8, 18 tf32 sparse; halved
    r"b300.*": _peak(2250.0, 4500.0, 1125.0, 75.0),
    # The same, GB300 NVL72, a 72nd of 360 PFLOP/s bf16, 720 fp8, 180 tf32 sparse; halved
    r"gb300.*": _peak(2500.0, 5000.0, 1250.0, 80.0),
    # AMD Instinct MI250X data sheet (2021): 383 bf16, 95.7 fp32 matrix for two dies; PyTorch sees each as a device
    r"mi250x.*": _peak(191.5, None, None, 47.9),
    # AMD CDNA 3 white paper (2023), table 2, and MI325X data sheet (2024): the same dies, without sparsity
    r"mi300x.*": _peak(1307.4, 2614.9, 653.7, 163.4),
    r"mi325x.*": _peak(1307.4, 2614.9, 653.7, 163.4),
    # AMD CDNA 4 white paper (2025): matrix bf16 2.5 PFLOP/s, fp8 5 PFLOP/s without sparsity; tf32 is gone
    r"mi355x.*": _peak(2516.6, 5033.2, None, 157.3),
}


def known_peak(name: str) -> Peak | None:
    """Of a device by the name that its driver gives; None for one that is not in the table."""
    short = re.sub(r"\b(nvidia|amd|instinct|geforce|radeon|tesla)\b", " ", name.lower())
    short = " ".join(short.replace("-", " ").replace("/", " ").split())
    if "mig" in short.split():
        return None
    return next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, short)), None)


@dataclass(frozen=True)
class Ceiling:
    """What utilisation is measured against: TFLOP/s, and whether that was measured rather than looked up."""

    tflops: float
    measured: bool
    text: str


@functools.cache
def ceiling(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """The data sheet's figure, or else what a large matrix product reaches (a fraction of a second, once a process)."""
    short = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        peak = known_peak(name)
        figure = None if peak is None else peak.of(dtype)
        if figure is not None:
            return Ceiling(figure, False, f"{figure:,.0f} TFLOP/s, dense {short} of {name}'s data sheet")
    else:
        name = "this machine" if device.type == "cpu" else device.type
    found = measure(device, dtype)
    return Ceiling(found, True, f"{found:,.3g} TFLOP/s, measured for {short} matrix products on {name}")


def measure(device: torch.device, dtype: torch.dtype, seconds: float = 0.1) -> float:
    """TFLOP/s of the fastest of some square matrix products. Waits for the device, about ``seconds`` long."""
    sizes = (1024, 4096, 8192) if device.type == "cuda" else (256, 512, 1024)
    generator = torch.Generator(device).manual_seed(0)
    wait = (lambda: None) if device.type == "cpu" else torch.accelerator.synchronize
    best = 0.0
    for size in sizes:
        # zeros or ones would draw less power, and run faster than what is trained on
        a = torch.randn(size, size, device=device, generator=generator).to(dtype)
        ended = time.perf_counter() + seconds / len(sizes)
        runs = 0
        while runs < 2 or time.perf_counter() < ended:
            wait()
            begun = time.perf_counter()
            a @ a
            wait()
            took = time.perf_counter() - begun
            runs += 1
            if runs > 1:
                best = max(best, 2 * size**3 / took / 1e12)
        if 8 * took > seconds:
            break
    return best
