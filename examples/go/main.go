// Command stream prints a completion from mlxd as it comes. The README beside it says how to build.
//
//	stream [ADDRESS] [MODEL] [PROMPT]
//
// The text goes to stdout as it comes, what it cost to stderr as one line of JSON. A stream that
// ends without `finish`, or with a gap in its offsets, has failed: the exit code says so.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	mlxdv1 "github.com/mlxd/mlxd/gen/go/mlxd/v1"
)

const (
	exitFailed      = 1
	exitInterrupted = 130
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	err := run(ctx, argument(1, "127.0.0.1:8555"), argument(2, ""), argument(3, "Once upon a time"))
	switch {
	case err == nil:
	case ctx.Err() != nil: // the cancelled context has ended the stream on the server too
		os.Exit(exitInterrupted)
	default:
		fmt.Fprintln(os.Stderr, describe(err))
		os.Exit(exitFailed)
	}
}

func argument(index int, otherwise string) string {
	if index < len(os.Args) {
		return os.Args[index]
	}
	return otherwise
}

func run(ctx context.Context, address, model, prompt string) error {
	// Dial and WithInsecure, not their newer names: Debian's grpc-go has only these, and every
	// later 1.x has them still.
	conn, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer conn.Close()
	stream, err := mlxdv1.NewInferenceServiceClient(conn).Generate(ctx, &mlxdv1.GenerateRequest{
		Model:     model,
		Prompt:    &mlxdv1.GenerateRequest_Text{Text: prompt},
		Sampling:  &mlxdv1.SamplingOptions{Temperature: proto.Float32(0.7), Seed: proto.Uint64(42)},
		MaxTokens: proto.Int32(48),
	})
	if err != nil {
		return err
	}
	last, err := print(stream)
	if err != nil {
		return err
	}
	return summarise(last)
}

// print writes the text of every message and returns the last one, which carries the finish.
func print(stream mlxdv1.InferenceService_GenerateClient) (*mlxdv1.GenerateResponse, error) {
	var next uint32
	var last *mlxdv1.GenerateResponse
	for {
		message, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF) && last.GetFinish() != nil:
			fmt.Println()
			return last, nil
		case errors.Is(err, io.EOF):
			return nil, fmt.Errorf("broken stream: it ended after %d tokens without a finish", next)
		case err != nil:
			return nil, err
		case message.GetOffset() != next:
			return nil, fmt.Errorf(
				"broken stream: token %d was due, %d came", next, message.GetOffset())
		}
		next += uint32(len(message.GetTokenIds()))
		fmt.Print(message.GetText())
		last = message
	}
}

func summarise(last *mlxdv1.GenerateResponse) error {
	names := protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}
	usage, err := names.Marshal(last.GetUsage())
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "{\"finish\":%q,\"usage\":%s}\n", last.GetFinish().GetReason(), usage)
	return nil
}

// describe words an error; the server's own come with their gRPC code.
func describe(err error) string {
	if answer, ok := status.FromError(err); ok {
		return fmt.Sprintf("%s: %s", answer.Code(), answer.Message())
	}
	return err.Error()
}
