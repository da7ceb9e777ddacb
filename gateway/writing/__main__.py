"""`python -m gateway.writing`: the process that commits."""

from gateway.writing.process import main

if __name__ == "__main__":
    main()
