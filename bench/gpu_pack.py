"""Pack of vLLM's CUDA wheel what one architecture and a model of full attention need: a twelfth of its size.

    python -m bench.gpu_pack vllm-*.whl packages --archive packages.tar.xz

Takes three libraries, and the Python files without those of other models' kernels. Code of other architectures in the
libraries is overwritten with zeros, which compress to nothing; the driver takes the code of its own architecture.
"""

from __future__ import annotations

import argparse
import struct
import tarfile
import zipfile
from pathlib import Path

LIBRARIES = ("_C_stable_libtorch.", "_vllm_fa3_C.", "cumem_allocator.")
LEFT_OUT = ("vllm/vllm-rs", "/deep_gemm/include/", "fmha_sm100", "mistral_common/data")
FATBIN, CUBIN = 0xBA55ED50, 2


def is_packed(name: str) -> bool:
    """Return whether a file of the wheel is needed."""
    if ".so" in Path(name).suffixes:
        return Path(name).name.startswith(LIBRARIES)
    return not any(part in name for part in LEFT_OUT)


def clear_others(library: bytearray, architecture: int) -> None:
    """Overwrite code of other architectures, and PTX, in an ELF file's section `.nv_fatbin`."""
    (sections_at,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", library, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", library, sections_at + number * size) for number in range(count)]
    names_at = sections[names_index][4]
    for name, _, _, _, start, length in sections:
        at, end = start, start + length
        if not library.startswith(b".nv_fatbin\0", names_at + name):
            continue
        while at < end:
            magic, _, header, content = struct.unpack_from("<IHHQ", library, at)
            if magic != FATBIN:
                # Containers are aligned.
                at += 8
                continue
            entry, at = at + header, at + header + content
            while entry < at:
                kind, _, entry_header, code = struct.unpack_from("<HHIQ", library, entry)
                (built_for,) = struct.unpack_from("<I", library, entry + 28)
                entry += entry_header
                if (kind, built_for) != (CUBIN, architecture):
                    library[entry : entry + code] = bytes(code)
                entry += code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("packages", type=Path, help="a folder for PYTHONPATH")
    parser.add_argument("--architecture", type=int, default=90, help="compute capability, without its dot")
    parser.add_argument("--archive", type=Path, help="where to write the folder as a .tar.xz, too")
    options = parser.parse_args()
    with zipfile.ZipFile(options.wheel) as wheel:
        for name in filter(is_packed, wheel.namelist()):
            content = bytearray(wheel.read(name))
            if ".so" in Path(name).suffixes:
                clear_others(content, options.architecture)
            file = options.packages / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    if options.archive:
        with tarfile.open(options.archive, "w:xz") as archive:
            archive.add(options.packages, ".")


if __name__ == "__main__":
    main()
