"""`dsft` as it is typed: typed.py COMMAND [word …]"""

from dsft.cli import main

if __name__ == "__main__":
    main()
