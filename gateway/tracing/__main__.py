"""`python -m gateway.tracing`: the process that exchanges with Langfuse."""

from gateway.tracing.process import main

if __name__ == "__main__":
    main()
