"""`pack-dataset`: arguments to `PackConfig`, results to stdout, everything else to stderr.

`main` starts to load the tokenizer before typer and rich are imported: a small build is as fast as that
load, and the imports fit into its shadow. A repack's checksums are begun likewise.
"""

from __future__ import annotations

import gc
import io
import os
import sys

GARBAGE = 200_000
"""New objects from which on cycles are looked for: imports make many, and no garbage."""


def main() -> None:
    """The console script. Exit 0 done, 1 a check failed, 2 wrong use or bad input, 130 interrupted."""
    # Numeric libraries start threads that a packer has no use for, and that forking would have to survive.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a letter is no error
            stream.reconfigure(errors="backslashreplace")
    try:
        _start_loading(sys.argv[1:])
        gc.set_threshold(GARBAGE)
        from padless.packer.commands import run

        code = run()
    except KeyboardInterrupt:  # before there was anything to interrupt
        print("interrupted", file=sys.stderr)
        code = 130
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # closed before we began
                stream.flush()
        except BrokenPipeError:  # whoever read has seen enough
            pass
    # Taking millions of small objects apart one by one takes longer than a small build's plan.
    os._exit(code)


def _start_loading(arguments: list[str]) -> None:
    if arguments[:1] == ["repack"]:
        from padless.packer import early_checksums

        early_checksums.start(arguments[1:])
        return
    if arguments[:1] != ["build"]:
        return
    for place, argument in enumerate(arguments):
        folder = argument.removeprefix("--tokenizer=") if argument.startswith("--tokenizer=") else ""
        if argument == "--tokenizer" and place + 1 < len(arguments):
            folder = arguments[place + 1]
        if folder and os.path.isdir(folder):
            from padless.packer.tokenizer_files import start_loading

            start_loading(folder).begun.wait()  # from here on the load runs without the GIL
            return


if __name__ == "__main__":
    main()
