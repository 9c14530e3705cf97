"""``python -m horovod_fftcomp``: the same as the command ``horovod-fftcomp``."""

from horovod_fftcomp.cli import main

if __name__ == "__main__":
    main()
