import cProfile,pstats,sys,pytest
pr=cProfile.Profile(); pr.enable()
pytest.main(["-q","-m","not mpi and not spawned","-p","no:cacheprovider","-p","no:xdist",*sys.argv[1:]])
pr.disable()
pstats.Stats(pr).sort_stats("tottime").print_stats(35)
pstats.Stats(pr).sort_stats("cumtime").print_stats(80)
