//! The application: a process that connects and listens in the namespaces it is told, driven over its stdin.

use std::{
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
    time::Duration,
};

use culvert_sys::netns::Netns;

use crate::world::{Namespace, SOON};

/// How long the application waits for an answer.
const ANSWER: Duration = Duration::from_secs(3);

/// The application: commands go in by its stdin, what became of them comes out.
pub(crate) struct App {
    child: Child,
    commands: ChildStdin,
    said: Receiver<(u32, String)>,
    kept: Vec<(u32, String)>,
    last: u32,
}

impl App {
    pub(crate) fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "app::app", "--nocapture"])
            .env("CULVERT_TEST_APP", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let commands = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, said) = mpsc::channel();
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let Some((id, what)) = line.strip_prefix("APP ").and_then(|l| l.split_once(' '))
                else {
                    continue;
                };
                if sender.send((id.parse().unwrap(), what.to_owned())).is_err() {
                    return;
                }
            }
        });
        Self { child, commands, said, kept: Vec::new(), last: 0 }
    }

    pub(crate) fn connect(&mut self, netns: &Namespace, addr: &str) -> u32 {
        self.command("connect", netns, addr)
    }

    pub(crate) fn serve(&mut self, netns: &Namespace, addr: &str) {
        let id = self.command("serve", netns, addr);
        assert_eq!(self.wait(id, SOON), "serving");
    }

    /// Answers datagrams with the word `app`.
    pub(crate) fn answer(&mut self, netns: &Namespace, addr: &str) {
        let id = self.command("answer", netns, addr);
        assert_eq!(self.wait(id, SOON), "answering");
    }

    /// Asks from one socket all servers of `addrs`, separated by commas; a single one is connected to.
    pub(crate) fn ask(&mut self, netns: &Namespace, addrs: &str) -> u32 {
        self.command("ask", netns, addrs)
    }

    fn command(&mut self, verb: &str, netns: &Namespace, addr: &str) -> u32 {
        self.last += 1;
        writeln!(self.commands, "{verb} {} {netns} {addr}", self.last).unwrap();
        self.last
    }

    pub(crate) fn wait(&mut self, id: u32, deadline: Duration) -> String {
        loop {
            if let Some(at) = self.kept.iter().position(|(said, _)| *said == id) {
                return self.kept.remove(at).1;
            }
            match self.said.recv_timeout(deadline) {
                Ok(said) => self.kept.push(said),
                Err(e) => return format!("nothing: {e}"),
            }
        }
    }

    pub(crate) fn expect_silence(&self, period: Duration) {
        if let Ok(said) = self.said.recv_timeout(period) {
            panic!("the application said {said:?}");
        }
    }
}

impl Drop for App {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Not a test of its own: the process that the others start, told by its environment to be an application.
#[test]
fn app() {
    if crate::world::env("CULVERT_TEST_APP").is_none() {
        return;
    }
    for line in io::stdin().lines().map_while(Result::ok) {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let [verb, id, netns, addr] = words.as_slice() else { panic!("bad command {line}") };
        let netns = Netns::open(&Path::new("/run/netns").join(netns)).unwrap();
        let addrs: Vec<SocketAddr> = addr.split(',').map(|addr| addr.parse().unwrap()).collect();
        let addr = *addrs.first().unwrap();
        match verb.as_str() {
            "ask" => {
                let id = id.clone();
                thread::spawn(move || {
                    let said = netns.run(|| ask(&addrs)).unwrap();
                    say(&id, &said.unwrap_or_else(|error| format!("failed {error}")));
                });
            }
            "answer" => {
                let socket = netns.run(|| UdpSocket::bind(addr)).unwrap().unwrap();
                say(id, "answering");
                thread::spawn(move || {
                    while let Ok((_, from)) = socket.recv_from(&mut [0; 64]) {
                        drop(socket.send_to(b"app", from));
                    }
                });
            }
            "connect" => {
                let id = id.clone();
                thread::spawn(move || {
                    let said = match netns.run(|| TcpStream::connect(addr)).unwrap() {
                        Ok(mut stream) => {
                            say(&id, &format!("connected {addr}"));
                            let mut byte = [0; 1];
                            match stream.read(&mut byte) {
                                Ok(1) => format!("read {}", char::from(byte[0])),
                                other => format!("ended {other:?}"),
                            }
                        }
                        Err(error) => format!("failed {error}"),
                    };
                    say(&id, &said);
                });
            }
            "serve" => {
                let listener = netns.run(|| TcpListener::bind(addr)).unwrap().unwrap();
                say(id, "serving");
                thread::spawn(move || {
                    listener.incoming().map_while(Result::ok).collect::<Vec<_>>()
                });
            }
            _ => panic!("unknown command {line}"),
        }
    }
}

/// What each server has answered, sorted.
fn ask(servers: &[SocketAddr]) -> io::Result<String> {
    let v4 = servers.iter().all(SocketAddr::is_ipv4);
    let any = if v4 { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any)?;
    socket.set_read_timeout(Some(ANSWER))?;
    let mut answers = Vec::new();
    let mut buffer = [0; 64];
    let text = |answer: Option<&[u8]>| String::from_utf8_lossy(answer.unwrap()).into_owned();
    if let [server] = servers {
        socket.connect(server)?;
        socket.send(b"name?")?;
        let length = socket.recv(&mut buffer)?;
        answers.push(format!("{server}={}", text(buffer.get(..length))));
    } else {
        for server in servers {
            socket.send_to(b"name?", server)?;
        }
        for _ in servers {
            let (length, from) = socket.recv_from(&mut buffer)?;
            answers.push(format!("{from}={}", text(buffer.get(..length))));
        }
    }
    answers.sort();
    Ok(answers.join(" "))
}

fn say(id: &str, what: &str) {
    println!("\nAPP {id} {what}");
}
