// The stubs are generated into gen/go, which is where the go_package of the .proto files puts them
// inside this module. `go mod tidy` writes go.sum.
module github.com/mlxd/mlxd

go 1.25.0

require (
	google.golang.org/grpc v1.83.1
	google.golang.org/protobuf v1.36.11
)
