"""`python -m freescale` is the console command."""

from freescale.cli.main import main

raise SystemExit(main())
